"""Plan files: JSON in which a split is {axis, weights, children} or {device}.

A device that plays what an earlier one does has that one's number in place of its actions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from ..errors import ConfigError, Violation, literal
from .describe import describe
from .ir import (
    Action,
    ActionKind,
    Estimate,
    LayerPlan,
    Leaf,
    Level,
    Plan,
    Precision,
    ShardTree,
    Split,
)

T = TypeVar("T")
_WORDS = {"level": get_args(Level), "precision": get_args(Precision), "kind": get_args(ActionKind)}


class _Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node as it stands in a file; either `device` or the other three."""

    device: int | None = None
    axis: str | None = None
    weights: tuple[int, ...] = ()
    children: tuple[_Node, ...] = ()


class _LayerEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A `LayerPlan` as it stands in a file."""

    split: _Node
    sp: bool = False
    level: Level = "none"
    recompute: bool = False
    offload: frozenset[str] = frozenset()


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One of the best plans of a search: in a line, and its estimate."""

    plan: str
    estimate: Estimate | None = None


class _RowEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A `Row` as it stands in a file, or with the whole plan as commands print it."""

    plan: msgspec.Raw
    estimate: Estimate | None = None


def _file_type() -> Any:
    """`Plan` with its layer plans and actions as they stand in a file."""
    fields: list[Any] = []
    own = {"layer_plans": dict[str, _LayerEntry], "order": tuple[tuple[Action, ...] | int, ...]}
    for field in msgspec.structs.fields(Plan):
        kind = own.get(field.name, field.type)
        required = field.default is msgspec.NODEFAULT
        fields.append((field.name, kind) if required else (field.name, kind, field.default))
    fields.append(("top", tuple[msgspec.Raw, ...], ()))
    return msgspec.defstruct("PlanFile", fields, kw_only=True, forbid_unknown_fields=True)


def save(plan: Plan, path: Path, top: Sequence[Plan] = ()) -> None:
    """Write a plan as JSON, replacing the file at once.

    `top` are the best ones, this among them: readers find each in a line, with its estimate.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [Row(plan=describe(each), estimate=each.estimate) for each in top]
    data = encode(plan, {"top": rows} if rows else {})
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def load(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        ConfigError: the file is missing, is no JSON or breaks the format; names the place.
    """
    return _read(path, decode)


def load_ranked(path: Path) -> tuple[Plan, tuple[Row, ...]]:
    """Read a plan file, and the best plans of its search; the plan alone where it names none.

    Raises:
        ConfigError: as `load`.
    """
    return _read(path, _decode_ranked)


def _read(path: Path, read: Callable[[bytes], T]) -> T:
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([_broken(path, None, f"cannot be read ({reason})")]) from error
    if path.suffix == ".toml":
        raise ConfigError([_broken(path, None, "is a specification, no plan")])
    try:
        return read(data)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        where = place.strip("`").removeprefix("$.")
        raise ConfigError([_broken(path, where or None, f"breaks the format: {rule}")]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        line = f", line {data[: int(at[1])].count(10) + 1}" if at else ""
        raise ConfigError([_broken(path, None, f"is no plan: {error}{line}")]) from error


def encode(plan: Plan, more: Mapping[str, Any] | None = None) -> bytes:
    """A plan as JSON, a field a line; then the fields of `more`."""
    fields = {field: getattr(plan, field) for field in plan.__struct_fields__} | dict(more or {})
    first: dict[tuple[Action, ...], int] = {}
    known: dict[int, int] = {}  # by identity: comparing all actions of all devices takes seconds
    for device, actions in enumerate(plan.order):
        if id(actions) not in known:
            known[id(actions)] = first.setdefault(actions, device)
    at = [known[id(actions)] for actions in plan.order]
    fields["order"] = [plan.order[n] if n == device else n for device, n in enumerate(at)]
    entries = [
        b'  "%s": %s' % (field.encode(), _encode_field(value)) for field, value in fields.items()
    ]
    return b"{\n" + b",\n".join(entries) + b"\n}\n"


def _encode_field(value: Any) -> bytes:
    if isinstance(value, dict) and value:
        rows = [
            b"    %s: %s" % (msgspec.json.encode(key), msgspec.json.encode(entry))
            for key, entry in value.items()
        ]
        return b"{\n" + b",\n".join(rows) + b"\n  }"
    return msgspec.json.encode(value)


def decode(data: bytes) -> Plan:
    """A plan from its JSON. Equal parts become one object, however often the file repeats them.

    Raises:
        msgspec.DecodeError: no JSON.
        msgspec.ValidationError: JSON that is no plan.
    """
    return _plan(msgspec.json.decode(data, type=_file_type()))


def _decode_ranked(data: bytes) -> tuple[Plan, tuple[Row, ...]]:
    entry = msgspec.json.decode(data, type=_file_type())
    plan = _plan(entry)
    rows = tuple(_row(msgspec.json.decode(each, type=_RowEntry)) for each in entry.top)
    return plan, rows or (Row(plan=describe(plan), estimate=plan.estimate),)


def _row(entry: _RowEntry) -> Row:
    data = bytes(entry.plan)
    line = describe(decode(data)) if data[:1] == b"{" else msgspec.json.decode(data, type=str)
    return Row(plan=line, estimate=entry.estimate)


def _plan(entry: Any) -> Plan:
    fields = {field: getattr(entry, field) for field in Plan.__struct_fields__}
    known: dict[_LayerEntry, LayerPlan] = {}
    layer_plans = {}
    for name, layer in entry.layer_plans.items():
        if layer not in known:
            known[layer] = _layer_plan(layer, f"$.layer_plans.{name}.split")
        layer_plans[name] = known[layer]
    orders: dict[tuple[Action, ...], tuple[Action, ...]] = {}
    order: list[tuple[Action, ...]] = []
    for device, actions in enumerate(entry.order):
        if isinstance(actions, int):
            if not 0 <= actions < device:
                rule = "Expected actions or the number of an earlier device"
                raise msgspec.ValidationError(f"{rule} - at `$.order[{device}]`")
            actions = order[actions]
        order.append(orders.setdefault(actions, actions))
    return Plan(**{**fields, "layer_plans": layer_plans, "order": tuple(order)})


def _layer_plan(entry: _LayerEntry, path: str) -> LayerPlan:
    return LayerPlan(
        split=_tree(entry.split, path),
        sp=entry.sp,
        level=entry.level,
        recompute=entry.recompute,
        offload=entry.offload,
    )


def _tree(node: _Node, path: str) -> ShardTree:
    if node.device is not None and node.axis is None and not node.children and not node.weights:
        return Leaf(node.device)
    if node.device is not None or node.axis is None or not node.children:
        raise msgspec.ValidationError(
            f"Expected either `device` or `axis`, `weights` and `children` - at `{path}`"
        )
    if len(node.weights) != len(node.children):
        raise msgspec.ValidationError(f"Expected a weight for each child - at `{path}.weights`")
    children = tuple(
        _tree(child, f"{path}.children[{index}]") for index, child in enumerate(node.children)
    )
    return Split(axis=node.axis, weights=node.weights, children=children)


def _broken(path: Path, where: str | None, rule: str) -> Violation:
    field = (where or "").rpartition(".")[2]
    words = _WORDS.get(field) if "enum" in rule else None
    return Violation(
        path="plan" if where is None else f"plan.{where}",
        value=str(path),
        rule=rule,
        legal=", ".join(map(literal, words or ())) or "a plan.json as `polyreme plan` writes it",
    )
