"""Locks and lazy values that are safe in forked children.

A forked child has only the thread that called `fork`. If another thread holds a lock meanwhile, no
thread of the child releases that lock. Objects that the child makes anew (engine, driver, batches)
have new locks. A lock that the child keeps must be a `ForkLock`."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

pid: int = os.getpid()
"""The pid of this process. A call of `os.getpid()` takes a tenth of the time of a send."""

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


def _renew_all() -> None:
    global pid
    pid = os.getpid()
    for lock in list(_locks):
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_all)

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (a decorator)
    """A `functools.cached_property` without a lock, as in Python 3.12 and later. Before 3.12,
    `cached_property` has a lock per class that another thread may hold during a fork."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = self._make(instance)
        # Do not use `__dict__`: Python 3.11 can crash if two threads create it at the same time.
        object.__setattr__(instance, self._name, value)
        return value
