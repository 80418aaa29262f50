"""Every field of a spec made wrong in every way: always a ConfigError, always with a way out."""

from __future__ import annotations

import copy
import datetime
import math
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec import inspect as types

from polyreme import spec
from polyreme.errors import ConfigError, Violation

TRUSTED = ("model", "data", "cluster")  # their own checks look at files
SORTS: tuple[Any, ...] = (
    True,
    3,
    2.5,
    "text",
    "\udc80",
    [1],
    {"a": 1},
    10**30,
    None,
    datetime.date(2020, 1, 1),
)
MISSING = object()


@dataclass(frozen=True)
class Fault:
    """Setting `path` to `value` (or removing it) must be reported at `reported`."""

    path: str
    value: Any
    reported: str
    hides: str  # fields that start so are not looked at


def _members(node: types.Type) -> list[types.Type]:
    if isinstance(node, types.Metadata):
        return _members(node.type)
    if isinstance(node, types.UnionType):
        return [each for member in node.types for each in _members(member)]
    return [node]


def _bare(node: types.StructType) -> dict[str, Any]:
    """The least document of a struct."""
    found = {}
    if node.tag is not None and all(field.name != node.tag for field in node.fields):
        found["kind"] = node.tag
    return found | {f.name: _right(_members(f.type)[0]) for f in node.fields if f.required}


def _right(node: types.Type) -> Any:
    match node:
        case types.StrType():
            return "text"
        case types.IntType() | types.FloatType():
            return 1
        case types.LiteralType():
            return node.values[0]
        case types.StructType():
            return _bare(node)
    raise AssertionError(f"no document of {node}")


def _documents() -> Iterator[dict[str, Any]]:
    """Documents that are right, and between them hold every kind of every table."""
    top = types.type_info(spec.Spec)
    kinds = {field.name: _members(field.type) for field in top.fields}
    for n in range(max(map(len, kinds.values()))):
        model, data = (kinds[name][n % len(kinds[name])] for name in ("model", "data"))
        document = {"model": _bare(model), "data": _bare(data), "train": {"steps": 20}}
        if data.cls.needs_seq_len is True:
            document["train"]["seq_len"] = 16
        yield document


def _inside(document: dict[str, Any]) -> Iterator[tuple[str, types.StructType, dict[str, Any]]]:
    """Every table that a document may have, with its path and what it holds."""

    def below(path: str, node: types.StructType, table: dict[str, Any]) -> Iterator[Any]:
        yield path, node, table
        for field in node.fields:
            where = f"{path}.{field.name}".lstrip(".")
            for member in _members(field.type):
                if not isinstance(member, types.StructType):
                    continue
                given = table.get(field.name, MISSING)
                if given is MISSING:
                    yield from below(where, member, _bare(member))
                elif given.get("kind", next(iter(given))) == member.tag or member.tag is None:
                    yield from below(where, member, given)

    yield from below("", types.type_info(spec.Spec), document)


def _faults(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Fault]]:
    for path, node, table in _inside(document):
        base = _with(document, path, table) if path else document
        prefix = f"{path}." if path else ""
        yield base, Fault(f"{prefix}unheard_of", 1, f"{prefix}unheard_of", f"{prefix}unheard_of")
        if node.tag is not None and "kind" in table:
            for value in ("nothing", node.tag[:-1], 3, MISSING):
                yield base, Fault(f"{prefix}kind", value, f"{prefix}kind", path)
        for field in node.fields:
            where = f"{prefix}{field.name}"
            if field.required and field.name != node.tag:
                yield base, Fault(where, MISSING, where, where)
            for value, index in _wrong(field.type):
                yield base, Fault(where, value, f"{where}{index}", where)


def _wrong(node: types.Type) -> Iterator[tuple[Any, str]]:
    """Values that a type does not accept, and the index at which that shows."""
    members = _members(node)
    structs = [each for each in members if isinstance(each, types.StructType)]
    below = (".kind" if structs[0].tag else ".a") if structs else ""
    below = ".a" if any(isinstance(each, types.DictType) for each in members) else below
    for value in SORTS:
        if not any(_accepted(value, each) for each in members):
            array = any(isinstance(each, types.VarTupleType | types.ListType) for each in members)
            index = "[0]" if array else ""
            yield value, {dict: below, list: index}.get(type(value), "")
    for each in members:
        match each:
            case types.IntType() | types.FloatType():
                if each.ge is not None:
                    yield each.ge - 1, ""
                if each.gt is not None:
                    yield each.gt, ""
                if each.lt is not None:
                    yield each.lt, ""
                if each.le is not None:
                    yield each.le + 1, ""
                if isinstance(each, types.FloatType):
                    yield from ((value, "") for value in (math.nan, math.inf, -math.inf))
            case types.LiteralType() if isinstance(each.values[0], str):
                if not any(isinstance(other, types.StrType) for other in members):
                    yield each.values[0] + "x", ""
                    yield "", ""
            case types.TupleType():
                yield [], ""
                yield ["x"] * len(each.item_types), "[0]"
            case types.VarTupleType() | types.ListType():
                yield [{"a": datetime.date(2020, 1, 1)}], "[0]"


def _accepted(value: Any, node: types.Type) -> bool:
    match node:
        case types.NoneType():
            return value is None
        case types.AnyType():
            return True
        case types.BoolType():
            return isinstance(value, bool)
        case types.IntType():
            return type(value) is int and value < 2**62
        case types.FloatType():
            return type(value) in (int, float) and value < 2**62
        case types.StrType():
            return value == "text"
        case types.VarTupleType() | types.ListType():
            return value == [1] and _accepted(1, _members(node.item_type)[0])
        case types.DictType():
            return value == {"a": 1} and _accepted(1, _members(node.value_type)[0])
        case types.LiteralType():
            return value in node.values
    return False


def _steps(path: str) -> list[str | int]:
    return [int(b) if b else a for a, b in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path)]


def _with(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path; MISSING removes it."""
    whole = copy.deepcopy(document)
    place: Any = whole
    *above, last = _steps(path)
    for step in above:
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
    if value is MISSING:
        place.pop(last, None)
    elif isinstance(last, int):
        place[:] = [*place[:last], value, *place[last + 1 :]]
    else:
        place[last] = copy.deepcopy(value)
    return whole


def _refusal(document: dict[str, Any], trusted: tuple[str, ...] = TRUSTED) -> list[Violation]:
    with pytest.raises(ConfigError) as caught:
        spec.parse(document, trusted=trusted)
    for violation in caught.value.violations:
        assert violation.path
        assert violation.rule
        assert violation.legal
        assert str(violation).startswith(f"{violation.path}: ")
    msgspec.json.encode(caught.value.violations)
    str(caught.value).encode()
    return list(caught.value.violations)


SINGLES = [each for document in _documents() for each in _faults(document)]


def _apart(a: Fault, b: Fault) -> bool:
    return not any(
        (other.path + ".").startswith(f"{one.hides}.".lstrip("."))
        for one, other in ((a, b), (b, a))
    )


def _draw(n: int, seed: int) -> Iterator[tuple[dict[str, Any], Fault, Fault]]:
    """Two faults far enough apart to show both."""
    source = random.Random(seed)
    while n:
        (document, a), (_, b) = source.sample(SINGLES, 2)
        if _apart(a, b) and a.path.split(".")[0] != b.path.split(".")[0]:
            tables = next(d for d, fault in SINGLES if fault is b)
            merged = document | {b.path.split(".")[0]: tables.get(b.path.split(".")[0], {})}
            n -= 1
            yield merged, a, b


def test_documents_are_right_before_they_are_made_wrong() -> None:
    kinds = set()
    for document in _documents():
        read = spec.parse(document, trusted=TRUSTED)
        kinds |= {type(read.model), type(read.data)}
    assert len(kinds) == 7 + 8


def _check_single(document: dict[str, Any], fault: Fault) -> None:
    wrong = _with(document, fault.path, fault.value)
    reported = [violation.path for violation in _refusal(wrong)]
    assert fault.reported in reported


def test_a_wrong_field_is_reported_where_it_stands() -> None:
    assert len(SINGLES) > 1000
    for document, fault in random.Random(0).sample(SINGLES, 400):
        _check_single(document, fault)


def test_two_wrong_fields_are_both_reported() -> None:
    for document, a, b in _draw(200, seed=1):
        wrong = _with(_with(document, a.path, a.value), b.path, b.value)
        reported = [violation.path for violation in _refusal(wrong)]
        assert a.reported in reported
        assert b.reported in reported


def test_checks_of_fields_in_files_raise_nothing_else() -> None:
    for document, fault in random.Random(2).sample(SINGLES, 150):
        _refusal(_with(document, fault.path, fault.value), trusted=())


@pytest.mark.parametrize("text", ["", "tests", "a\0b", "x" * 5000, "~nobody-here/x", "[", "é"])
@pytest.mark.parametrize("kind", ["text", "tokens", "arrays", "images", "svmlight", "datasets"])
def test_strange_paths_are_violations(kind: str, text: str) -> None:
    document = {
        "model": {"path": text},
        "data": {"kind": kind, "path": text, "heldout": text},
        "train": {"steps": 1},
        "cluster": {"file": text},
    }
    _refusal(document, trusted=())


def _way_out(document: dict[str, Any], violation: Violation) -> dict[str, Any]:
    """The document with the first legal value that a violation offers."""
    if violation.legal.startswith("leave it out"):
        return _with(document, violation.path, MISSING)
    if "unknown key" in violation.rule:
        *_, last = _steps(violation.path)
        above = violation.path[: -len(str(last))]
        without = _with(document, violation.path, MISSING)
        return _with(without, above + violation.legal.split(",")[0], violation.value)
    for end in (each.end() for each in re.finditer(r".(?=, | \(|$)", violation.legal)):
        try:
            value = tomllib.loads(f"value = {violation.legal[:end]}")["value"]
        except tomllib.TOMLDecodeError:
            continue
        return _with(document, violation.path, value)
    raise AssertionError(f"no value to type in: {violation}")


def _follow(document: dict[str, Any]) -> None:
    """Do what the errors say until there is none; none comes back."""
    seen = set()
    for _ in range(25):
        try:
            spec.parse(document, trusted=TRUSTED)
        except ConfigError as error:
            violations = error.violations
        else:
            return
        key = (violations[0].path, repr(violations[0].value), violations[0].rule)
        assert key not in seen
        seen.add(key)
        document = _way_out(document, violations[0])
    raise AssertionError("still wrong")


def test_following_the_legal_values_leads_out_of_any_fault() -> None:
    for document, fault in random.Random(3).sample(SINGLES, 250):
        _follow(_with(document, fault.path, fault.value))


@pytest.mark.long
def test_every_single_fault_and_2000_pairs() -> None:
    for document, fault in SINGLES:
        _check_single(document, fault)
        _follow(_with(document, fault.path, fault.value))
    for document, a, b in _draw(2000, seed=4):
        wrong = _with(_with(document, a.path, a.value), b.path, b.value)
        assert {a.reported, b.reported} <= {violation.path for violation in _refusal(wrong)}
        _follow(wrong)
