"""A plan as a picture: nested boxes of devices for each stage, and the order of a step."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..plan.describe import degrees_of, describe_offload
from ..plan.grid import even_degrees
from ..plan.ir import Action, LayerPlan, Leaf, Plan, ShardTree, Split, axes, devices
from ..units import count
from .words import clipped, runs_of, size

LEAF_W, LEAF_H, GAP, PAD, TITLE_H = 62, 46, 6, 8, 18
MAX_DEVICES = 64  # drawn one by one; more are drawn as examples and a count
MAX_ACTIONS = 64
MAX_ORDERS = 8
LEVELS = {
    "none": "each device holds everything; gradients are all-reduced",
    "optimizer": "optimizer state is split over the shards",
    "grads": "gradients and optimizer state are split over the shards",
    "params": "parameters, gradients and optimizer state are split over the shards",
}


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a stage that run alike."""

    stage: int
    layers: tuple[str, ...]
    layer_plan: LayerPlan

    @property
    def names(self) -> str:
        """The layers with consecutive numbers drawn together."""
        return runs_of(self.layers)

    @property
    def how(self) -> str:
        """Degrees of the axes."""
        even = even_degrees(self.layer_plan.split)
        found = degrees_of(self.layer_plan.split)
        text = " x ".join(f"{axis} {n}" for axis, n in found) or "one device"
        return f"{text}, ep {even.ep}" if even is not None and even.ep > 1 else text

    @property
    def level_text(self) -> str:
        """What the level means."""
        if not {"shard", "ep"} & {*axes(self.layer_plan.split)} and self.layer_plan.level == "none":
            return "whole copy"
        return LEVELS[self.layer_plan.level]

    @property
    def extras(self) -> str:
        """Recomputation, sequence parallelism and offloading."""
        found = ["recomputed in backward"] if self.layer_plan.recompute else []
        found += ["sequence split over tp"] if self.layer_plan.sp else []
        found += [describe_offload(self.layer_plan.offload)] if self.layer_plan.offload else []
        return ", ".join(found) or "activations kept"


class _Box(msgspec.Struct, frozen=True):
    """A drawn thing: its size and its SVG with the origin at its corner."""

    width: float
    height: float
    body: str


def segments(plan: Plan) -> tuple[Segment, ...]:
    """For each stage, its layers grouped by how they run, in order of first appearance."""
    found = []
    for index, stage in enumerate(plan.stages):
        groups: dict[LayerPlan, list[str]] = {}
        for layer in stage.layers:
            if layer in plan.layer_plans:
                groups.setdefault(plan.layer_plans[layer], []).append(layer)
        found += [
            Segment(stage=index, layers=tuple(layers), layer_plan=layer_plan)
            for layer_plan, layers in groups.items()
        ]
    return tuple(found)


def devices_svg(plan: Plan, width: int, capacity_bytes: float | None = None) -> str:
    """Stages with their layers, and inside them devices by axis, as wide as asked for.

    The bar in a device is its predicted memory over the capacity (or the fullest device).
    """
    memory = _memory(plan)
    whole = capacity_bytes or max((sum(m.values()) for m in memory.values()), default=0)
    n_all = len({device for part in segments(plan) for device in devices(part.layer_plan.split)})
    elide = n_all > MAX_DEVICES

    def leaf(device: int, label: str) -> _Box:
        return _leaf(device, label, memory.get(device), whole)

    boxes = []
    parts = segments(plan)
    shown = _ends(range(len(plan.stages)), 3 if elide else 16)
    for index in shown:
        if index is None:
            hidden = len(plan.stages) - len([i for i in shown if i is not None])
            boxes.append(_note(f"… {count(hidden, 'more stage')}"))
            continue
        mine = [part for part in parts if part.stage == index]
        boxes.append(_stage(plan, index, mine, width, leaf, elide))
    drawn = _flow(boxes, width, gap=12)
    label = f"plan over {count(n_all, 'device')} in {count(len(plan.stages), 'stage')}"
    return _svg(drawn, label)


def order_svg(plan: Plan, width: int) -> str:
    """What each device does in a step, in order; devices that do the same share a row."""
    groups: dict[tuple[Action, ...], list[int]] = {}
    for place, actions in enumerate(plan.order):
        groups.setdefault(actions, []).append(place)
    cell, label_w = 30, 122
    fits = max(4, min(MAX_ACTIONS, (width - label_w - 60) // cell))
    rows = []
    for row, (actions, places) in enumerate(list(groups.items())[:MAX_ORDERS]):
        y = row * (cell - 2)
        name = runs_of([f"device {place}" for place in places])
        name = name.replace("device ", "devices ", 1) if len(places) > 1 else name
        rows.append(
            f'<text class="dim" x="0" y="{y + 17}">{escaped(clipped(name, 19))}'
            f"<title>{escaped(name)}</title></text>"
        )
        for i, action in enumerate(actions[:fits]):
            rows.append(_action(action, label_w + i * cell, y, cell - 3))
        if len(actions) > fits:
            x = label_w + fits * cell + 4
            rows.append(f'<text class="dim" x="{x}" y="{y + 17}">+{len(actions) - fits:,}</text>')
    height = min(len(groups), MAX_ORDERS) * (cell - 2)
    if len(groups) > MAX_ORDERS:
        height += 22
        more = count(len(groups) - MAX_ORDERS, "more order")
        rows.append(f'<text class="dim" x="0" y="{height - 6}">… {more}</text>')
    return _svg(_Box(width, height, "".join(rows)), "order of a step")


def _memory(plan: Plan) -> dict[int, Mapping[str, int]]:
    """Predicted memory by device; estimates list the plan's devices in ascending order."""
    if plan.estimate is None:
        return {}
    used = sorted({d for part in segments(plan) for d in devices(part.layer_plan.split)})
    return dict(zip(used, plan.estimate.memory, strict=False))


def _stage(
    plan: Plan,
    index: int,
    parts: Sequence[Segment],
    width: int,
    leaf: Callable[[int, str], _Box],
    elide: bool,
) -> _Box:
    inner = width - 2 * PAD
    trees = dict.fromkeys(part.layer_plan.split for part in parts)
    blocks = []
    for tree in trees:
        names = [part for part in parts if part.layer_plan.split == tree]
        lines = [f"{part.names}: {part.extras}" if len(parts) > 1 else part.names for part in names]
        blocks.append(_lines(lines, inner))
        blocks.append(_tree(tree, inner, leaf, elide, ""))
    body = _flow(blocks, inner, gap=GAP, column=True)
    title = f"stage {index}" if len(plan.stages) > 1 else "every layer"
    return _framed(title, body, "stage")


def _tree(
    tree: ShardTree, width: float, leaf: Callable[[int, str], _Box], elide: bool, label: str
) -> _Box:
    if isinstance(tree, Leaf):
        return leaf(tree.device, label)
    flat = all(isinstance(child, Leaf) for child in tree.children)
    limit = (8 if flat else 3) if elide else len(tree.children)
    boxes = []
    for index in _ends(range(len(tree.children)), limit):
        if index is None:
            hidden = len(tree.children) - limit
            alike = "alike" if _alike(tree) else "not all alike"
            boxes.append(_note(f"… {hidden:,} more {tree.axis} parts, {alike}"))
            continue
        child = tree.children[index]
        name = _part(tree, index)
        if isinstance(child, Leaf):
            boxes.append(leaf(child.device, name))
        else:
            inner = _tree(child, width - 2 * PAD, leaf, elide, name)
            boxes.append(_framed(name, inner, f"axis {tree.axis}"))
    return _flow(boxes, width, gap=GAP)


def _part(tree: Split, index: int) -> str:
    name = f"{tree.axis} {index}"
    if len(set(tree.weights)) > 1:
        name += f" · {tree.weights[index]}/{sum(tree.weights)}"
    return name


def _alike(tree: Split) -> bool:
    def shape(node: ShardTree) -> object:
        if isinstance(node, Leaf):
            return None
        return (node.axis, node.weights, tuple(shape(child) for child in node.children))

    return len({shape(child) for child in tree.children}) == 1 and len(set(tree.weights)) == 1


def _ends(items: Sequence[int], limit: int) -> list[int | None]:
    """The first items and the last, with None for what is left out between them."""
    if len(items) <= limit:
        return list(items)
    return [*items[: limit - 1], None, items[-1]]


def _leaf(device: int, label: str, memory: Mapping[str, int] | None, whole: float) -> _Box:
    text = f"device {device}"
    tip = f"{text}, {label}" if label else text
    bar = ""
    if memory and whole:
        used = sum(memory.values())
        room = LEAF_W - 12
        filled = min(1.0, used / whole) * room
        tip += f": {size(used)} predicted"
        bar = (
            f'<rect class="room" x="6" y="36" width="{room}" height="4" rx="2"/>'
            f'<rect class="used" x="6" y="36" width="{filled:.1f}" height="4" rx="2"/>'
        )
    body = (
        f'<rect class="leaf" width="{LEAF_W}" height="{LEAF_H}" rx="5"/>'
        f'<text class="num" x="{LEAF_W / 2}" y="17">{device}</text>'
        f'<text class="dim mid" x="{LEAF_W / 2}" y="30">{escaped(clipped(label, 11))}</text>'
        f"{bar}<title>{escaped(tip)}</title>"
    )
    return _Box(LEAF_W, LEAF_H, body)


def _action(action: Action, x: float, y: float, edge: float) -> str:
    text = action.kind if action.kind == "U" else f"{action.kind}{action.microbatch}"
    tip = {
        "F": "forward",
        "B": "backward",
        "I": "backward, input half",
        "W": "backward, weight half",
        "U": "update",
    }[action.kind]
    tip += f" of microbatch {action.microbatch}" if action.kind != "U" else ""
    return (
        f'<g transform="translate({x},{y})"><rect class="act {action.kind}" width="{edge}" '
        f'height="{edge - 3}" rx="4"/><text class="act-text {action.kind}" x="{edge / 2}" '
        f'y="16">{text}</text><title>{tip}, stage {action.stage}</title></g>'
    )


def _lines(lines: Sequence[str], width: float) -> _Box:
    fits = int(width / 6.4)
    body = "".join(
        f'<text class="layers" x="0" y="{13 + 16 * i}">{escaped(clipped(line, fits))}'
        f"<title>{escaped(line)}</title></text>"
        for i, line in enumerate(lines)
    )
    return _Box(max(len(clipped(line, fits)) for line in lines) * 6.4, 16 * len(lines), body)


def _note(text: str) -> _Box:
    return _Box(6.4 * len(text), LEAF_H, f'<text class="dim" x="0" y="27">{escaped(text)}</text>')


def _framed(title: str, inner: _Box, style: str) -> _Box:
    width = max(inner.width, 6.6 * len(title)) + 2 * PAD
    height = inner.height + TITLE_H + 2 * PAD - 2
    body = (
        f'<rect class="frame {style}" width="{width:.0f}" height="{height:.0f}" rx="7"/>'
        f'<text class="title" x="{PAD}" y="17">{escaped(title)}</text>'
        f'<g transform="translate({PAD},{TITLE_H + PAD - 2})">{inner.body}</g>'
    )
    return _Box(width, height, body)


def _flow(boxes: Sequence[_Box], width: float, *, gap: int, column: bool = False) -> _Box:
    """Boxes side by side, in rows of like length where they wrap; or below each other."""
    widest = max((box.width for box in boxes), default=0)
    fits = 1 if column else max(1, int((width + gap) // (widest + gap)))
    rows = -(-len(boxes) // fits) if boxes else 0
    per_row = -(-len(boxes) // rows) if rows else 1
    parts, x, y, row_h, total_w = [], 0.0, 0.0, 0.0, 0.0
    for i, box in enumerate(boxes):
        if i and i % per_row == 0:
            x, y, row_h = 0.0, y + row_h + gap, 0.0
        parts.append(f'<g transform="translate({x:.1f},{y:.1f})">{box.body}</g>')
        x += box.width + gap
        row_h = max(row_h, box.height)
        total_w = max(total_w, x - gap)
    return _Box(total_w, y + row_h, "".join(parts))


def _svg(box: _Box, label: str) -> str:
    width, height = int(box.width) + 2, int(box.height) + 2
    return (
        f'<svg class="plan" role="img" aria-label="{escaped(label)}" width="{width}" '
        f'height="{height}" viewBox="-1 -1 {width} {height}">{box.body}</svg>'
    )


def escaped(text: str) -> str:
    """Text as it may stand in a drawing."""
    return html.escape(text)
