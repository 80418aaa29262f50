"""Properties that are found once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class once(Generic[_T]):  # noqa: N801 - used like property
    """As functools' cached_property, without the lock that this takes before Python 3.12.

    Messages have several of these, and the lock costs more than most of what they find.
    """

    def __init__(self, find: Callable[[Any], _T]) -> None:
        self._find, self.__doc__ = find, find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> _T:
        found = self._find(instance)
        instance.__dict__[self._name] = found
        return found
