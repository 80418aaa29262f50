"""Every member of every part of an algorithm, read off the configuration."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from .attack import Attack
from .compose import DataParallel
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Member:
    """One choice of one part, as a spec names it: `part` is "compress", `kind` is "TopK"."""

    part: str
    kind: str
    cls: type[msgspec.Struct]

    @property
    def line(self) -> str:
        """What it is."""
        return first_line(self.cls)

    @property
    def source(self) -> str:
        """Where it is from; empty where its docstring does not say."""
        return source(self.cls)


def members() -> tuple[Member, ...]:
    """All of them, part by part; the parts of a part follow it ("topology.graph")."""
    return tuple(dict.fromkeys(_below(DataParallel, "")))


def schedules() -> tuple[Member, ...]:
    """Schedules of the learning rate, which are the training's."""
    return tuple(Member(part="schedule", kind=_tag(each), cls=each) for each in get_args(Schedule))


def attacks() -> tuple[Member, ...]:
    """What hostile workers may do, which is no part of an algorithm."""
    return tuple(Member(part="attack", kind=_tag(each), cls=each) for each in get_args(Attack))


def first_line(thing: object) -> str:
    """What a docstring says first."""
    first = _text(thing).split("\n\n")[0].split("Source:")[0]
    return " ".join(first.split())


def source(thing: object) -> str:
    """The sentence after "Source:" in a docstring."""
    found = re.search(r"Source: (.+?)(?:\n\n|\nDiffers:|$)", _text(thing), re.DOTALL)
    said = " ".join(found[1].split()) if found else ""
    return re.split(r'(?<! al)\.\s+(?=[A-Z"])', said)[0].removesuffix(".")


def _below(cls: type[msgspec.Struct], path: str) -> Iterator[Member]:
    """Members of each field of a struct; choices that stand elsewhere already are not repeated."""
    for name, hint in get_type_hints(cls).items():
        kinds = [each for each in _choices(hint) if _is_member(each)]
        part = f"{path}.{name}" if path else name
        if name not in cls.__struct_fields__ or (path and _elsewhere(kinds, part)):
            continue
        for kind in kinds:
            yield Member(part=part, kind=_tag(kind), cls=kind)
        for kind in kinds:
            yield from _below(kind, part)


def _choices(hint: Any) -> tuple[Any, ...]:
    """What a field's type allows: of a tuple of many, what each of them may be."""
    if get_origin(hint) is tuple:
        return _choices(get_args(hint)[0])
    return get_args(hint) or (hint,)


def _elsewhere(kinds: list[type[msgspec.Struct]], part: str) -> bool:
    """Whether a part of a part takes what another takes: Rotated's `inner`, ADPSGD's `graph`."""
    own = f"{__package__}.{part.split('.')[0]}."
    if not any(kind.__module__.startswith(own) for kind in kinds):
        return True
    hints = get_type_hints(DataParallel).values()
    whole = {each for hint in hints for each in get_args(hint) or (hint,)}
    return set(kinds) <= whole


def _is_member(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def _text(thing: object) -> str:
    return inspect.getdoc(thing) or ""
