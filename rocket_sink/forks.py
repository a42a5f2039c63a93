"""Locks that a forked child finds free.

A thread of the parent that holds a lock while another one forks does not exist in the child, where
the lock would be held for ever. What a client makes anew in the child as a whole (engine, driver,
batches) has new locks by that; a lock that outlives the fork is a `ForkLock`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

_locks: Final[weakref.WeakSet[ForkLock]] = weakref.WeakSet()


class ForkLock:
    """A `threading.Lock` for what is done rarely; free in a forked child, whoever held it.

    A child that is forked while its own thread holds the lock cannot release it.
    """

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _locks.add(self)

    def acquire(self, timeout_s: float = -1) -> bool:
        """Wait at most so long, or without an end; False: it was not free in time."""
        return self._lock.acquire(timeout=timeout_s)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *failure: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """In a forked child, before anything else runs there."""
        self._lock = threading.Lock()


def _renew_all() -> None:
    for lock in list(_locks):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)

T = TypeVar("T")


class lazy(Generic[T]):  # noqa: N801 (a decorator)
    """`functools.cached_property` as it is from Python 3.12 on.

    Before, that holds a lock of the class while it makes a value, which a forked child finds held
    for ever when another thread of its parent was making one.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        value = instance.__dict__[self._name] = self._make(instance)
        return value
