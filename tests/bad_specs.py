"""Specs made wrong, derived from the option structs: whatever is added there is covered here.

A sound document for every kind of model and data stands in a folder with the files it names;
each field of each table, and of each kind of table, is then made wrong in every way its type knows.
"""

from __future__ import annotations

import copy
import datetime
import functools
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import tomli_w
from msgspec import inspect as types

from bad_spec_files import files as files
from polyreme import spec

MISSING = object()
_VALUES: Mapping[str, Any] = {  # of fields that name what must be there
    "model.preset.preset": "llama-7b",
    "simulate.compute.file.path": "seconds.txt",
    "model.path.path": "model",
    "model.transformers.model_type": "llama",
    "model.python.factory": "model.py:make",
    "data.text.path": "corpus.txt",
    "data.tokens.path": "tokens.bin",
    "data.tokens.vocab": 256,
    "data.arrays.path": "arrays.npz",
    "data.images.path": "images",
    "data.svmlight.path": "points.svm",
    "data.csr.path": "rows",
    "data.ratings.path": "ratings.npz",
    "data.datasets.path": "dataset",
    "data.datasets.columns": {"features": "x", "labels": "y"},
}
_PARTNERS = (  # kinds of model and data that go together
    ("preset", "python_source"),
    ("path", "text"),
    ("transformers", "tokens"),
    ("char_lstm", "text"),
    ("resnet20", "digits"),
    ("resnet20", "images"),
    ("mlp", "arrays"),
    ("mlp", "svmlight"),
    ("mlp", "csr"),
    ("mlp", "generated"),
    ("mlp", "datasets"),
    ("linear", "generated"),
    ("matrix_factorization", "ratings"),
    ("pca", "arrays"),
    ("python", "digits"),
)
_WITH = {"simulate.faults[": ("data_parallel.sync", {"kind": "ASGD"})}  # what tables go with
_STRANGE = ("", "null", "None", "ü漢", "a\tb", "\x7f", "x" * 3000, "-0", "1e400")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`value` at `path` (MISSING: nothing there) must be reported at `reported`."""

    base: int
    path: str
    value: Any
    reported: str
    table: Any  # path and least table of a kind, put in place before; None: the document's own


def members(node: types.Type) -> list[types.Type]:
    if isinstance(node, types.Metadata):
        return members(node.type)
    if isinstance(node, types.UnionType):
        return [each for member in node.types for each in members(member)]
    return [node]


def documents() -> list[dict[str, Any]]:
    """Sound documents that between them hold every kind of model and data."""
    top = {field.name: field for field in types.type_info(spec.Spec).fields}
    kinds = {
        name: {each.tag: each for each in members(top[name].type)} for name in ("model", "data")
    }
    partners = list(_PARTNERS)
    for name, at in (("model", 0), ("data", 1)):
        missing = set(kinds[name]) - {pair[at] for pair in partners}
        assert not missing, f"no partner in _PARTNERS for {missing}"
    found = []
    for model, data in partners:
        document = {
            "model": _bare("model", kinds["model"][model]),
            "data": _bare("data", kinds["data"][data]),
            "train": {"steps": 20},
            # With these, every feedback goes.
            "data_parallel": {"rule": {"kind": "SGD"}, "compress": {"kind": "TopK"}},
        }
        if data in ("python_source", "text", "tokens"):
            document["train"]["seq_len"] = 16
        found.append(document)
    return found


def _bare(path: str, node: types.StructType) -> dict[str, Any]:
    """The least table of a kind."""
    found: dict[str, Any] = {}
    if node.tag is not None and all(field.name != node.tag for field in node.fields):
        found["kind"] = node.tag
    for field in node.fields:
        known = _VALUES.get(f"{path}.{node.tag}.{field.name}")
        if known is not None:
            found[field.name] = known
        elif field.required:
            found[field.name] = _right(members(field.type)[0])
    return found


def _right(node: types.Type) -> Any:
    match node:
        case types.StrType():
            return "text"
        case types.IntType() | types.FloatType():
            return 1
        case types.LiteralType():
            return node.values[0]
        case types.BoolType():
            return True
        case types.DictType():
            return {}
        case types.VarTupleType():
            return [_right(members(node.item_type)[0])] * max(1, node.min_length or 0)
    raise AssertionError(f"no value of {node}")


_ONE_OR_MORE = ("simulate.attack",)  # a table, or an array of them


def faults(base: int, document: dict[str, Any]) -> Iterator[Fault]:
    """Every single fault of a document and of the tables that it might have."""
    for path, node, table, default, before in _tables(document):
        fault = functools.partial(_fault, base, path, before)
        names = [field.name for field in node.fields]
        yield fault("unheard_of", 1)
        if names:
            yield fault(names[0] + "x", 1)
            yield fault(names[-1].upper() + "_", {"a": 1})
        yield fault("ключ", 0)
        if node.tag is not None and "kind" in table:
            for value in ("nothing", node.tag[:-1], "", 3, [node.tag], {"kind": node.tag}):
                yield fault("kind", value)
            if not default:
                yield fault("kind", MISSING)
        for value in (3, [], [table], True, datetime.date(2020, 1, 1)) if path else ():
            above = before if path.endswith("]") else None  # an array must be there
            if path in _ONE_OR_MORE and isinstance(value, list):
                continue
            yield Fault(base=base, path=path, value=value, reported=path, table=above)
        for field in node.fields:
            if field.required and field.name != node.tag:
                yield fault(field.name, MISSING)
            for value, index in _wrong(field.type):
                yield fault(field.name, value, index)


def _fault(base: int, path: str, before: Any, key: str, value: Any, index: str = "") -> Fault:
    below = f"{path}.{key}" if path else key
    return Fault(base=base, path=below, value=value, reported=below + index, table=before)


def _tables(
    document: dict[str, Any],
) -> Iterator[tuple[str, types.StructType, dict[str, Any], bool, Any]]:
    """Tables that a document may have: path, type, content, whether their kind has a default.

    And what must be put in place before (path and table), where it is not the document's own.
    """

    top: Any = types.type_info(spec.Spec)
    shallow = {
        member.cls
        for table in top.fields
        for node in members(table.type)
        if isinstance(node, types.StructType)
        for field in node.fields
        for member in members(field.type)
        if isinstance(member, types.StructType)
    }

    def below(
        path: str, node: types.StructType, table: dict[str, Any], default: bool, before: Any
    ) -> Any:
        yield path, node, table, default, before
        for field in node.fields:
            where = f"{path}.{field.name}".lstrip(".")
            tables = [each for each in members(field.type) if isinstance(each, types.StructType)]
            if where.count(".") > 1 and tables and tables[0].cls in shallow:
                tables = tables[:1]  # these choices stand nearer the top too
            for member in _items(field.type):
                bare = [_bare(where, member)]
                first = (
                    (where, bare)
                    if before is None
                    else (before[0], {**before[1], field.name: bare})
                )
                yield from below(f"{where}[0]", member, bare[0], False, first)
            for member in tables:
                given = table.get(field.name)
                own = isinstance(field.default, msgspec.Struct)
                same = given is not None and (
                    not member.tag or given.get("kind", next(iter(given), None)) == member.tag
                )
                if not same and where not in ("model", "data"):  # for these: _PARTNERS
                    bare = _bare(where, member)
                    put_first = (where, bare)
                    if before is not None:
                        inner = where.removeprefix(f"{before[0]}.")
                        put_first = (before[0], put(before[1], inner, bare))
                    yield from below(where, member, bare, own, put_first)
                elif same:
                    yield from below(where, member, given, own, before)

    yield from below("", top, document, False, None)


def _items(node: types.Type) -> list[types.StructType]:
    """Tables that an array may hold."""
    if not isinstance(node, types.VarTupleType):
        return []
    return [each for each in members(node.item_type) if isinstance(each, types.StructType)]


def _wrong(node: types.Type) -> Iterator[tuple[Any, str]]:
    """Values that a type does not accept, and the index at which that shows."""
    options = members(node)
    array = any(isinstance(each, types.VarTupleType | types.ListType) for each in options)
    table = any(isinstance(each, types.StructType | types.DictType) for each in options)
    sorts = (True, 3, 2.5, "text", [1], {"a": 1}, datetime.date(2020, 1, 1), datetime.time(1))
    for value in (*sorts, 10**30, -(10**30), "null", ""):
        if any(_accepted(value, each) for each in options):
            continue
        if isinstance(value, dict) and table:
            continue  # a table of other keys: see `faults`
        yield value, "[0]" if array and isinstance(value, list) else ""
    for each in options:
        match each:
            case types.IntType() | types.FloatType():
                whole = isinstance(each, types.IntType)
                small: float = 1 if whole else 1e-9
                if each.ge is not None:
                    yield each.ge - small, ""
                    yield -(2**62), ""
                if each.gt is not None:
                    yield each.gt, ""
                    yield from (() if whole else ((-0.0, ""), (-1e300, "")))
                if each.lt is not None:
                    yield each.lt, ""
                if each.le is not None:
                    yield each.le + max(small, 1e-9 * each.le), ""
                if not whole:
                    yield from ((value, "") for value in (math.nan, math.inf, -math.inf))
            case types.LiteralType() if isinstance(each.values[0], str):
                if not any(
                    isinstance(other, types.StrType | types.StructType) for other in options
                ):
                    yield each.values[0] + "x", ""
                    yield each.values[0].upper() + " ", ""
                    yield from ((value, "") for value in _STRANGE)
            case types.TupleType():
                yield [], ""
                yield ["x"] * len(each.item_types), "[0]"
                yield [0.5] * (len(each.item_types) + 1), ""
            case types.VarTupleType() | types.ListType():
                if not _items(each):
                    yield [{"a": datetime.date(2020, 1, 1)}], "[0]"
                yield [[]], "[0]"
            case types.DictType() if not isinstance(each.value_type, types.AnyType):
                yield {"a": [1]}, ".a"


def _accepted(value: Any, node: types.Type) -> bool:
    match node:
        case types.NoneType():
            return value is None
        case types.AnyType():
            return True
        case types.BoolType():
            return isinstance(value, bool)
        case types.IntType():
            return type(value) is int and abs(value) < 2**62
        case types.FloatType():
            return type(value) in (int, float) and abs(value) < 2**62
        case types.StrType():
            return isinstance(value, str)
        case types.VarTupleType() | types.ListType():
            return value == [1] and _accepted(1, members(node.item_type)[0])
        case types.DictType():
            return value == {"a": 1} and _accepted(1, members(node.value_type)[0])
        case types.LiteralType():
            return value in node.values and type(value) is type(node.values[0])
    return False


def steps(path: str) -> list[str | int]:
    return [int(b) if b else a for a, b in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path)]


def at(document: Any, path: str) -> Any:
    for step in steps(path):
        if not isinstance(document, Mapping | list):
            return None
        try:
            document = document[step]
        except (LookupError, TypeError):
            return None
    return document


def put(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a path; MISSING removes it."""
    whole = copy.deepcopy(document)
    place: Any = whole
    *above, last = steps(path)
    for step in above:
        place = place[step] if isinstance(step, int) else place.setdefault(step, {})
    if value is MISSING:
        if isinstance(place, list):
            del place[last]
        else:
            place.pop(last, None)
    else:
        place[last] = copy.deepcopy(value)
    return whole


def made(document: dict[str, Any], *wrong: Fault) -> dict[str, Any]:
    """The document with the faults in it."""
    for fault in wrong:
        if fault.table is not None:
            document = put(document, *fault.table)
        for path, partner in _WITH.items():
            if fault.path.startswith(path):
                document = put(document, *partner)
    for fault in wrong:
        document = put(document, fault.path, fault.value)
    return document


def singles() -> list[Fault]:
    """Every fault once, whatever the document around it."""
    seen = {}
    for base, document in enumerate(documents()):
        for fault in faults(base, document):
            kind = at(document, fault.path.split(".")[0])
            kind = kind.get("kind", next(iter(kind), None)) if isinstance(kind, Mapping) else None
            key = (fault.path, repr(fault.value), repr(kind), repr(fault.table))
            seen.setdefault(key, fault)
    return list(seen.values())


def pairs(n: int, seed: int) -> list[tuple[Fault, Fault]]:
    """Two faults in one document, in different tables, so that both show."""
    source = random.Random(seed)
    by_base: dict[int, list[Fault]] = {}
    for base, document in enumerate(documents()):
        by_base[base] = list(faults(base, document))
    found = []
    while len(found) < n:
        a, b = source.sample(by_base[source.choice(list(by_base))], 2)
        if a.path.split(".")[0] != b.path.split(".")[0]:
            found.append((a, b))
    return found


def toml(document: dict[str, Any]) -> bytes:
    return tomli_w.dumps(document).encode()
