"""A struct that could be read only in part, so that the rest can still be checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import Violation


class Unread(Exception):
    """A check asked for a field that is itself wrong; the check says nothing."""


class Partial:
    """Stands for a struct of `cls`; holds the fields that are right, raises Unread for others.

    Methods and properties of `cls` work on it, and isinstance takes it for one.
    """

    def __init__(self, cls: type, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)
        self.__dict__["_cls"] = cls

    def with_(self, name: str, value: Any) -> Partial:
        """The same with one more field that is right."""
        cls, fields = self.__dict__["_cls"], dict(self.__dict__)
        del fields["_cls"]
        return Partial(cls, {**fields, name: value})

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.__dict__["_cls"]

    def __getattr__(self, name: str) -> Any:
        cls = self.__dict__["_cls"]
        if name in cls.__struct_fields__:
            raise Unread(name)
        if name.startswith("__struct_"):
            return getattr(cls, name)
        member = inspect.getattr_static(cls, name)
        return member.__get__(self, cls) if hasattr(member, "__get__") else member


def checked(check: Callable[[], Iterable[Violation]], path: str) -> list[Violation]:
    """What a check finds before it asks for a field that is wrong.

    Files named in a spec may be unreadable in ways that a check does not foresee; that is a
    violation of `path` too.
    """
    found: list[Violation] = []
    try:
        found.extend(check())
    except Unread:
        pass
    except (OSError, RuntimeError, ValueError) as error:
        rule, legal = f"cannot be looked at ({error})", "names of files that can be read"
        found.append(Violation(path=path, value=None, rule=rule, legal=legal))
    return found
