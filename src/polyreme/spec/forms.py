"""What a type accepts, in words and as values that can be typed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import inspect as types

from ..errors import literal

_INT64 = 2**63
_SEQUENCES = (types.ListType, types.VarTupleType, types.SetType, types.FrozenSetType)
_DEEPEST = 4
_LONGEST = 16


def members(node: types.Type) -> tuple[types.Type, ...]:
    """The types of a union, without their annotations; one type for whatever is no union."""
    if isinstance(node, types.Metadata):
        return members(node.type)
    if isinstance(node, types.UnionType):
        return tuple(each for member in node.types for each in members(member))
    return (node,)


def named_by_field(node: types.StructType) -> bool:
    """Whether a kind is called like one of its own fields, which then stands for it."""
    return any(field.name == node.tag for field in node.fields)


def accepts(value: object, node: types.Type) -> bool:
    """Whether the value is of the type's sort, whatever its bounds; no bool is a number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    match node:
        case types.AnyType():
            return True
        case types.NoneType():
            return value is None
        case types.BoolType():
            return isinstance(value, bool)
        case types.IntType():
            return number and isinstance(value, int)
        case types.FloatType():
            return number
        case types.StrType():
            return isinstance(value, str)
        case types.LiteralType():
            return any(type(value) is type(each) for each in node.values)
        case types.StructType() | types.DictType():
            return isinstance(value, Mapping)
        case types.TupleType():
            return isinstance(value, list | tuple)
    assert isinstance(node, _SEQUENCES), f"no rule for {node}"
    return isinstance(value, list | tuple)


def out_of_bounds(value: Any, node: types.Type) -> str | None:
    """The rule that a value of the right sort breaks, or None."""
    match node:
        case types.LiteralType():
            return None if value in node.values else "is not one of the legal values"
        case types.StrType():
            if any("\ud800" <= char <= "\udfff" for char in value):
                return "is not Unicode text"
            if node.pattern is not None and not re.search(node.pattern, value):
                return f"does not match {node.pattern}"
            if not (node.min_length or 0) <= len(value) <= (node.max_length or len(value)):
                return f"is not {_lengths(node, 'characters')}"
        case types.IntType() | types.FloatType():
            if isinstance(value, int) and not -_INT64 <= value < _INT64:
                return "does not fit in 64 bits"
            bounds = bounds_of(node)
            if not bounds:
                return None
            if not math.isfinite(value):
                return "is not a finite number"
            if not within(value, node):
                return f"is not {bounds}"
        case types.AnyType():
            return (
                None
                if _is_plain(value)
                else "is neither number, text, true, false, array nor table"
            )
    return None


def within(value: float, node: types.IntType | types.FloatType) -> bool:
    """Whether a number keeps all bounds; NaN keeps none."""
    return (
        (node.gt is None or value > node.gt)
        and (node.ge is None or value >= node.ge)
        and (node.lt is None or value < node.lt)
        and (node.le is None or value <= node.le)
        and (node.multiple_of is None or value % node.multiple_of == 0)
    )


def bounds_of(node: types.IntType | types.FloatType) -> str:
    """``>= 0 and < 1``; nothing where there are no bounds."""
    signs = ((">", node.gt), (">=", node.ge), ("<", node.lt), ("<=", node.le))
    parts = [f"{sign} {_number(bound, node)}" for sign, bound in signs if bound is not None]
    if node.multiple_of is not None:
        parts.append(f"a multiple of {_number(node.multiple_of, node)}")
    return " and ".join(parts)


def sort_of(node: types.Type) -> str:
    """What a value of this type is called: ``integer >= 1``."""
    match node:
        case types.AnyType():
            return "value"
        case types.NoneType():
            return "nothing"
        case types.BoolType():
            return "true or false"
        case types.IntType():
            return f"integer {bounds_of(node)}".rstrip()
        case types.FloatType():
            return f"number {bounds_of(node)}".rstrip()
        case types.StrType():
            return "text"
        case types.LiteralType():
            return " or ".join(literal(each) for each in node.values)
        case types.StructType():
            return "table"
        case types.DictType():
            inner = _sorts(node.value_type)
            return "table" if inner == "value" else f"table of {inner} by name"
        case types.TupleType():
            inner = ", ".join(dict.fromkeys(map(_sorts, node.item_types)))
            return f"array of {len(node.item_types)} ({inner})"
    assert isinstance(node, _SEQUENCES), f"no name for {node}"
    return f"array ({_sorts(node.item_type)})"


def legal(node: types.Type, default: object) -> str:
    """The values that would be accepted, one that can be typed first."""
    match node:
        case types.NoneType():
            return "leave it out"
        case types.BoolType():
            return "false, true" if default is False else "true, false"
        case types.LiteralType():
            return ", ".join(literal(each) for each in node.values)
        case types.StructType():
            return literal(example(node))
    fits = default is not None and accepts(default, node)
    first = default if fits else example(node)
    return f"{literal(first)} (or any {sort_of(node)})"


def example(node: types.Type) -> Any:
    """A plain value of the type that keeps its bounds: of several types of the first.

    What ``msgspec.Meta(examples=[...])`` names comes before all else.
    """
    match node:
        case types.Metadata():
            named = named_example(node)
            return example(node.type) if named is None else named
        case types.UnionType():
            return example(node.types[0])
        case types.NoneType():
            return None
        case types.BoolType():
            return True
        case types.LiteralType():
            return node.values[0]
        case types.IntType() | types.FloatType():
            return _example_number(node)
        case types.StrType() | types.AnyType():
            return "text"
        case types.StructType():
            table: dict[str, Any] = {}
            if node.tag is not None and not named_by_field(node):
                table[str(node.tag_field)] = node.tag
            required = (each for each in node.fields if each.required)
            return table | {each.encode_name: example(each.type) for each in required}
        case types.TupleType():
            return [example(each) for each in node.item_types]
        case types.DictType():
            return {}
    assert isinstance(node, _SEQUENCES), f"no example of {node}"
    return [example(node.item_type)] * (node.min_length or 0)


def named_example(node: types.Type) -> Any:
    """The example that a type's annotation names; None where there is none."""
    if isinstance(node, types.UnionType):
        return next(filter(None, map(named_example, node.types)), None)
    if not isinstance(node, types.Metadata):
        return None
    named = (node.extra_json_schema or {}).get("examples")
    return named[0] if named else named_example(node.type)


def _sorts(node: types.Type) -> str:
    return " or ".join(dict.fromkeys(sort_of(each) for each in members(node)))


def _example_number(node: types.IntType | types.FloatType) -> float:
    low = node.gt if node.ge is None else node.ge
    high = node.lt if node.le is None else node.le
    step = node.multiple_of or 1
    tries: Sequence[float] = [1, 0]
    if low is not None:
        tries = [low, low + step, *tries]
    if high is not None:
        tries = [*tries, high, high - step]
    if low is not None and high is not None:
        tries = [*tries, (low + high) / 2]
    number = next(each for each in tries if within(each, node))
    return int(number) if isinstance(node, types.IntType) else float(number)


def _number(bound: float, node: types.IntType | types.FloatType) -> str:
    return str(int(bound)) if isinstance(node, types.IntType) or bound == int(bound) else str(bound)


def _lengths(node: types.StrType, unit: str) -> str:
    low, high = node.min_length or 0, node.max_length
    return f"{low} {unit} or more" if high is None else f"{low} to {high} {unit}"


def _is_plain(value: object, depth: int = 32) -> bool:
    if isinstance(value, Mapping):
        pairs = value.items()
        return depth > 0 and all(_is_plain(k, 0) and _is_plain(v, depth - 1) for k, v in pairs)
    if isinstance(value, list | tuple):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    if isinstance(value, str):
        return not any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return -_INT64 <= value < _INT64
    return isinstance(value, bool | float)


def plain(value: object, depth: int = _DEEPEST) -> Any:
    """The value as it can be printed and written as JSON: cut where deep or long."""
    if isinstance(value, Mapping):
        if not depth:
            return "..."
        kept = list(value.items())[:_LONGEST]
        return {str(plain(str(key))): plain(item, depth - 1) for key, item in kept}
    if isinstance(value, list | tuple):
        return [plain(item, depth - 1) for item in value[:_LONGEST]] if depth else "..."
    if isinstance(value, bool | float) or value is None:
        return value
    if isinstance(value, int) and -_INT64 <= value < _INT64:
        return int(value)
    text = value if isinstance(value, str) else str(value)
    return text.encode("utf-8", "backslashreplace").decode()
