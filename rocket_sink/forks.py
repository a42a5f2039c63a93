"""Locks and lazy values that are safe in forked children.

A child has none of its parent's other threads. If one of them holds a lock during the fork, nobody
in the child releases it. Parts of a client that a child makes again (engine, driver, batches) get
new locks. Locks that a child keeps must be a `ForkLock`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

pid: int = os.getpid()
"""The pid of this process. `os.getpid()` for each message would cost a tenth of its send."""

_locks: Final[weakref.WeakSet[ForkLock]] = weakref.WeakSet()


class ForkLock:
    """A `threading.Lock` that is free in a forked child, even if it was held during the fork."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def acquire(self, timeout_s: float = -1) -> bool:
        """Acquire the lock; return False after `timeout_s` (-1: no limit)."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *failure: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Make the lock free; called in a forked child before other code."""
        self._lock = threading.Lock()


def _renew_all() -> None:
    global pid
    pid = os.getpid()
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (a decorator)
    """A `functools.cached_property` without a lock, as in Python 3.12 and later.

    Before 3.12 it has a lock per class, which a thread of the parent could hold during a fork.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = self._make(instance)
        # In Python 3.11, two threads that make a `__dict__` at once can crash the process.
        object.__setattr__(instance, self._name, value)
        return value
