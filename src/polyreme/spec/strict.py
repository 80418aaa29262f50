"""Reads a document (tables, arrays, numbers, text) into structs, and reports everything wrong.

msgspec stops at the first error; this walks the types itself. A struct's ``check()``, if it has
one, returns violations with whole paths; it is asked as soon as the struct stands, and told
nothing of fields that are wrong (see `Partial`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect as types

from ..errors import Violation, like, literal, nearest_first
from .forms import (
    accepts,
    example,
    legal,
    members,
    named_by_field,
    named_example,
    out_of_bounds,
    plain,
    sort_of,
)
from .partial import Partial, checked


class _Wrong:
    """What stands in place of a value that could not be read."""


_WRONG = _Wrong()


def read(
    document: object, cls: type[msgspec.Struct], trusted: Sequence[str] = ()
) -> tuple[Any, list[Violation]]:
    """The struct, and every violation in the order of the fields.

    With violations, the struct is a `Partial` that holds whatever could be read. In the top-level
    tables in `trusted` no ``check()`` is asked.
    """
    reading = _Reading(trusted)
    value = reading.struct("", document, _node(cls))
    unique = {(each.path, each.rule): each for each in reversed(reading.violations)}
    return value, list(reversed(unique.values()))


def offered(cls: type[msgspec.Struct], name: str) -> Any:
    """The value that is called legal where a field's type is wrong."""
    field = next(each for each in _node(cls).fields if each.encode_name == name)
    default = _default(field)
    return example(field.type) if default is None else default


class _Reading:
    """One walk over a document."""

    def __init__(self, trusted: Sequence[str]) -> None:
        self.violations: list[Violation] = []
        self._trusted = tuple(trusted)

    def value(self, path: str, value: object, node: types.Type, default: object = None) -> Any:
        options = members(node)
        default = named_example(node) if default is None else default
        tagged = [each for each in options if isinstance(each, types.StructType) and each.tag]
        if tagged and (isinstance(value, Mapping) or len(tagged) == len(options)):
            return self._tagged(path, value, tagged, default)
        chosen = next((each for each in options if accepts(value, each)), None)
        if chosen is None:
            rule = f"is {_kind(value)}, not {_either(options)}"
            return self._refuse(path, value, rule, _legal(options, default))
        match chosen:
            case types.StructType():
                return self.struct(path, value, chosen)
            case types.ListType() | types.VarTupleType() | types.SetType() | types.FrozenSetType():
                return self._array(path, value, chosen)
            case types.TupleType():
                return self._tuple(path, value, chosen, default)
            case types.DictType():
                return self._dict(path, value, chosen)
            case types.NoneType() | types.BoolType():
                return value
        broken = out_of_bounds(value, chosen)
        if broken:
            others = [each for each in options if each is not chosen]
            wanted = [_nearest(value, chosen, default), _legal(others, None)]
            return self._refuse(path, value, broken, ", ".join(filter(None, wanted)))
        return float(value) if isinstance(chosen, types.FloatType) else value  # type: ignore[arg-type]

    def struct(self, path: str, value: object, node: types.StructType) -> Any:
        """A struct, a Partial where a field is wrong, or nothing where it is no table."""
        if not isinstance(value, Mapping):
            rule = f"is {_kind(value)}, not a table"
            return self._refuse(path, value, rule, legal(node, None))
        before = len(self.violations)
        fields: dict[str, Any] = {}
        wrong: list[types.Field] = []
        for field in node.fields:
            below = f"{path}.{field.encode_name}" if path else field.encode_name
            default = _default(field)
            if field.encode_name in value:
                given = value[field.encode_name]
                fields[field.name] = self.value(below, given, field.type, default)
            elif field.required:
                wanted = _legal(members(field.type), named_example(field.type))
                fields[field.name] = self._refuse(below, None, "is missing", wanted)
            else:
                fields[field.name] = default
            if fields[field.name] is _WRONG and not (isinstance(default, msgspec.Struct)):
                wrong.append(field)
        known = {*(field.encode_name for field in node.fields), node.tag_field}
        for key in value:
            if key not in known:
                self._unknown(path, key, value, node)
        clean = len(self.violations) == before
        right = {
            name: item
            for name, item in fields.items()
            if item is not _WRONG and not (path and isinstance(item, Partial))
        }
        found: Any = node.cls(**fields) if clean else Partial(node.cls, right)
        section = path.split(".")[0]
        if hasattr(node.cls, "check") and section not in self._trusted:
            self.violations += checked(found.check, path)
            for field in wrong:
                self._better(path, field, node, right)
        return found

    def _better(
        self, path: str, field: types.Field, node: types.StructType, right: Mapping[str, Any]
    ) -> None:
        """Where the table's own check refuses what would be legal by type, say what it takes."""
        below = f"{path}.{field.encode_name}" if path else field.encode_name
        trial = Partial(node.cls, {**right, field.name: offered(node.cls, field.encode_name)})
        refused = next((each for each in checked(trial.check, path) if each.path == below), None)
        for at, each in enumerate(self.violations):
            if refused is not None and each.path == below:
                self.violations[at] = msgspec.structs.replace(each, legal=refused.legal)

    def _tagged(
        self, path: str, value: object, options: Sequence[types.StructType], default: object
    ) -> Any:
        field = options[0].tag_field
        assert field is not None
        tags = [str(each.tag) for each in options]
        if not isinstance(value, Mapping):
            first = nearest_first(str(value), tags) if isinstance(value, str) else tags
            by_tag = {str(each.tag): each for each in options}
            wanted = ", ".join(literal(example(by_tag[tag])) for tag in first)
            return self._refuse(path, value, f"is {_kind(value)}, not a table", wanted)
        # A kind that is named like one of its own fields (preset, path) is written by that field.
        short = [str(each.tag) for each in options if named_by_field(each)]
        given = [key for key in (*short, field) if key in value]
        below = f"{path}.{field}" if path else field
        if len(given) > 1:
            listed = ", ".join((*short, field))
            for key in given[1:]:
                rule = f"stands beside {given[0]}; exactly one of {listed} is wanted"
                self._refuse(f"{path}.{key}", value[key], rule, "leave it out")
            return _WRONG
        usual = getattr(type(default), "__struct_config__", None)
        if not given and usual is not None and usual.tag in tags:
            return self.struct(path, value, options[tags.index(usual.tag)])
        if not given:
            extra = f"; exactly one of {', '.join((*short, field))} is wanted" if short else ""
            wanted = ", ".join(literal(tag) for tag in tags if tag not in short)
            return self._refuse(below, None, f"is missing{extra}", wanted)
        tag = value[field] if field in value else given[0]
        if tag in short and field in value:
            rule = f"is written as {tag} = ..., without {field}"
            wanted = ", ".join(literal(each) for each in tags if each not in short)
            return self._refuse(below, tag, rule, wanted)
        chosen = next((each for each in options if each.tag == tag), None)
        if chosen is None:
            ordered = nearest_first(tag, tags) if isinstance(tag, str) else tags
            wanted = ", ".join(literal(each) for each in ordered if each not in short)
            return self._refuse(below, tag, f"is no {field} of [{path}]", wanted)
        return self.struct(path, value, chosen)

    def _array(self, path: str, value: Any, node: Any) -> Any:
        items = [
            self.value(f"{path}[{index}]", item, node.item_type) for index, item in enumerate(value)
        ]
        low, high = node.min_length or 0, node.max_length
        if not low <= len(items) <= (len(items) if high is None else high):
            size = f"{low} or more" if high is None else f"{low} to {high}"
            return self._refuse(path, value, f"does not have {size} items", legal(node, None))
        if any(item is _WRONG for item in items):
            return _WRONG
        match node:
            case types.ListType():
                return items
            case types.VarTupleType():
                return tuple(items)
        return frozenset(items) if isinstance(node, types.FrozenSetType) else set(items)

    def _tuple(self, path: str, value: Any, node: types.TupleType, default: object) -> Any:
        if len(value) != len(node.item_types):
            rule = f"has {len(value)} items, not {len(node.item_types)}"
            return self._refuse(path, value, rule, legal(node, default))
        items = [
            self.value(f"{path}[{index}]", item, below)
            for index, (item, below) in enumerate(zip(value, node.item_types, strict=True))
        ]
        return _WRONG if any(item is _WRONG for item in items) else tuple(items)

    def _dict(self, path: str, value: Any, node: types.DictType) -> Any:
        found = {}
        for key, item in value.items():
            below = f"{path}.{plain(str(key))}"
            if not isinstance(key, str) or any("\ud800" <= char <= "\udfff" for char in key):
                self._refuse(below, item, "has a name that is not text", "leave it out")
            found[key] = self.value(below, item, node.value_type)
        return _WRONG if any(item is _WRONG for item in found.values()) else found

    def _unknown(self, path: str, key: object, table: Any, node: types.StructType) -> None:
        name = plain(str(key))
        where = f"[{path}]" if path else "the spec"
        if node.tag is not None:
            where += f" of {node.tag_field} {literal(node.tag)}"
        free = [each.encode_name for each in node.fields if each.encode_name not in table]
        close = like(name, [each.encode_name for each in node.fields])
        wanted = ", ".join(close) or "leave it out"
        if free and not close:
            wanted = f"leave it out (free keys: {', '.join(free)})"
        below = f"{path}.{name}" if path else name
        self._refuse(below, table[key], f"stands under an unknown key of {where}", wanted)

    def _refuse(self, path: str, value: object, rule: str, wanted: str) -> _Wrong:
        found = Violation(path=path, value=plain(value), rule=rule, legal=wanted)
        self.violations.append(found)
        return _WRONG


@functools.cache
def _node(cls: type[msgspec.Struct]) -> types.StructType:
    node = types.type_info(cls)
    assert isinstance(node, types.StructType)
    return node


def _default(field: types.Field) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return None


def _legal(options: Iterable[types.Type], default: object) -> str:
    wanted = [each for each in options if not isinstance(each, types.NoneType)]
    first = sorted(wanted, key=lambda each: not accepts(default, each))
    return ", ".join(dict.fromkeys(legal(each, default) for each in first))


def _either(options: Iterable[types.Type]) -> str:
    named = [sort_of(each) for each in options if not isinstance(each, types.NoneType)]
    return " or ".join(map(_with_article, dict.fromkeys(named)))


def _with_article(sort: str) -> str:
    if sort.startswith(("integer", "array")):
        return f"an {sort}"
    return f"a {sort}" if sort.startswith(("number", "table")) else sort


def _nearest(value: object, node: types.Type, default: object) -> str:
    if isinstance(node, types.LiteralType) and isinstance(value, str):
        names = [each for each in node.values if isinstance(each, str)]
        others = [each for each in node.values if not isinstance(each, str)]
        return ", ".join(literal(each) for each in (*nearest_first(value, names), *others))
    return legal(node, default)


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return "text"
        case Mapping():
            return "a table"
        case list() | tuple():
            return "an array"
    return f"a {type(value).__name__}"
