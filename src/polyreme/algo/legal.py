"""Whether a member that was made in Python, not read from a spec, holds legal values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ..errors import ConfigError, Violation, literal, nearest_first

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
        legal = _broken(value, hint)
        if legal is not None:
            shown = value if isinstance(value, bool | int | float | str) else repr(value)
            rule = "is not legal"
            found.append(Violation(path=f"{name}.{field}", value=shown, rule=rule, legal=legal))
    check = getattr(member, "check", None)
    if check is not None and not found:
        found += check()
    if found:
        raise ConfigError(found)
    return member


def tag(member: msgspec.Struct) -> str:
    """What specs call a member's kind; its class's name where it is the user's own."""
    kind = member.__class__
    return str(kind.__struct_config__.tag or kind.__name__)


def _members(hint: Any) -> list[type]:
    """The structs that a type allows."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [hint]
    return [kind for part in get_args(hint) for kind in _members(part)]


def no_member(path: str, value: object, kinds: Sequence[type]) -> ConfigError:
    """The error for what is none of these, such as a name or a class: which there are."""
    names = [kind.__name__ for kind in kinds]
    shown = value if isinstance(value, bool | int | float | str) else repr(value)
    rule = "is none"
    if isinstance(value, type):
        shown, rule = value.__name__, "is a class, and one that is made of it is wanted"
        names = names if value in kinds else [value.__name__, *names]
    near = nearest_first(shown, names) if isinstance(shown, str) else names
    legal = ", ".join(f"{each}(...)" for each in near)
    return ConfigError([Violation(path=path, value=shown, rule=rule, legal=legal)])


def _broken(value: Any, hint: Any) -> str | None:
    """What is legal, where the value is not."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number"
    if isinstance(value, msgspec.Struct):
        return None  # it may be the user's own, which no union names
    kinds = _members(hint)
    if kinds and get_origin(hint) is tuple and isinstance(value, tuple):
        return next(filter(None, (_broken(each, get_args(hint)[0]) for each in value)), None)
    if kinds and value is not None:  # a spec's table is read where specs are, not here
        return ", ".join(f"{kind.__name__}(...)" for kind in kinds)
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return _legal(hint, value)
    return None


_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _legal(hint: Any, value: object) -> str:
    """The values of a type in words, those like `value` first.

    >>> _legal(Annotated[float, msgspec.Meta(gt=0, le=1)] | None, 2.0)
    'float > 0 and <= 1, None'
    """
    if hint is NoneType:
        return "None"
    parts = get_args(hint)
    if get_origin(hint) is Literal:
        names = [each for each in parts if isinstance(each, str)]
        near = nearest_first(value, names) if isinstance(value, str) else names
        return ", ".join(map(literal, dict.fromkeys((*near, *parts))))
    if get_origin(hint) is Annotated:
        metas = [each for each in parts[1:] if isinstance(each, msgspec.Meta)]
        bounds = [
            f"{sign} {getattr(meta, name):g}"
            for meta in metas
            for name, sign in _BOUNDS.items()
            if getattr(meta, name) is not None
        ]
        return " ".join((_legal(parts[0], value), " and ".join(bounds))).strip()
    if get_origin(hint) in (UnionType, Union):
        return ", ".join(_legal(each, value) for each in parts)
    return str(getattr(hint, "__name__", hint))
