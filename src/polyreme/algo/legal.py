"""Whether a member that was made in Python, not read from a spec, holds legal values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from ..errors import ConfigError, Violation

_Member = TypeVar("_Member", bound=msgspec.Struct)


def made(kind: type[_Member], options: Mapping[str, Any], name: str) -> _Member:
    """A member with these options; `name` is what the user called.

    Raises:
        TypeError: An option is unknown; the message lists those that are not.
        ConfigError: A value is not legal, or an option is missing.
    """
    fields = kind.__struct_fields__
    unknown = [option for option in options if option not in fields]
    if unknown:
        legal = ", ".join(fields) or "none"
        raise TypeError(f"{name} has no option {', '.join(map(repr, unknown))}. Legal: {legal}.")
    return checked(kind(**options), name)


def checked(member: _Member, name: str) -> _Member:
    """The member itself. Raises ConfigError with every value of it that is not legal."""
    found = []
    for field, hint in get_type_hints(type(member), include_extras=True).items():
        if field not in member.__struct_fields__:
            continue
        value = getattr(member, field)
        rule = _broken(value, hint)
        if rule is not None:
            legal = rule.removeprefix("Expected ").split(", got ")[0].replace("`", "")
            shown = value if isinstance(value, bool | int | float | str) else repr(value)
            rule = "is not legal"
            found.append(Violation(path=f"{name}.{field}", value=shown, rule=rule, legal=legal))
    check = getattr(member, "check", None)
    if check is not None and not found:
        found += check()
    if found:
        raise ConfigError(found)
    return member


def _members(hint: Any) -> list[type]:
    """The structs that a type allows."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [kind for part in get_args(hint) for kind in _members(part)]


def _broken(value: Any, hint: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, msgspec.Struct):
        return None  # it may be the user's own, which no union names
    kinds = _members(hint)
    if kinds and value is not None:  # a spec's table is read where specs are, not here
        return ", ".join(f"{kind.__name__}(...)" for kind in kinds)
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        return str(error)
    return None
