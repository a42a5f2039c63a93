"""Values that are made when they are first asked for, without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

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
