"""What of a plan other tools have words for, and what none of them has.

All of these tools lay processes out as the planner does: pipeline ranks outermost, then replicas,
shards, and tensor parts side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from ...errors import Violation
from ..check_said import as_named, played_by
from ..grid import Degrees, Grid, even_degrees, grid_of
from ..ir import Level, Plan, accumulation_order
from ..order import ORDERS
from ..order.kind import Ranks

_BLOCK = re.compile(r"(^|\.)block\.\d+$")
GRADIENT_BYTES = {"fp32": 4, "bf16": 4, "fp64": 8}  # of an element: the master's width


class Sketch(msgspec.Struct, frozen=True, kw_only=True):
    """A plan whose layers all run alike but for recomputation, on devices in their order.

    `level` and `sp` are ``none`` and false where there is nothing that they would split. Experts of
    blocks are dealt out to `ep` devices.
    """

    plan: Plan
    grid: Grid
    level: Level
    sp: bool
    ep: int = 1

    @property
    def replica(self) -> int:
        """Copies of the model; shards that split the batch alone are such."""
        return self.grid.replica * (1 if self.level != "none" else self.grid.shard)

    @property
    def shard(self) -> int:
        """Devices that share states."""
        return self.grid.shard if self.level != "none" else 1

    @property
    def tp(self) -> int:
        """Tensor parts."""
        return self.grid.tp

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return self.grid.pp

    @property
    def data(self) -> int:
        """Devices that share the batch."""
        return self.grid.degrees.data

    @property
    def world(self) -> int:
        """Processes."""
        return len(self.grid.devices)

    @property
    def microbatch(self) -> int:
        """Samples of a microbatch."""
        return self.plan.global_batch // (self.data * self.plan.microbatches)

    @property
    def bucket_elements(self) -> int:
        """Gradients of a bucket."""
        return max(1, self.plan.bucket_bytes // GRADIENT_BYTES[self.plan.precision])

    @property
    def is_stack(self) -> bool:
        """Whether the layers are those of one stack: embed, block.0 and so on, head."""
        names = [name for stage in self.plan.stages for name in stage.layers]
        return names == ["embed", *(f"block.{index}" for index in range(len(names) - 2)), "head"]

    @property
    def blocks(self) -> tuple[tuple[str, ...], ...]:
        """The blocks of each stage; all layers where no layer is called a block."""
        found = [
            tuple(name for name in stage.layers if _BLOCK.search(name))
            for stage in self.plan.stages
        ]
        return tuple(found) if any(found) else tuple(stage.layers for stage in self.plan.stages)

    @property
    def recomputed(self) -> tuple[tuple[bool, ...], ...]:
        """Of each stage, which of its blocks are computed again."""
        plans = self.plan.layer_plans
        return tuple(tuple(plans[name].recompute for name in stage) for stage in self.blocks)

    @property
    def recomputes(self) -> str:
        """``none``, ``all`` or ``some`` of the blocks."""
        found = {each for stage in self.recomputed for each in stage}
        return "some" if len(found) > 1 else "all" if True in found else "none"

    @property
    def recomputed_ends(self) -> tuple[str, ...]:
        """Layers that are computed again and are no blocks."""
        blocks = {name for stage in self.blocks for name in stage}
        plans = self.plan.layer_plans
        return tuple(name for name, each in plans.items() if each.recompute and name not in blocks)


def wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    """A violation at a field of the plan."""
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)


def sketch_of(plan: Plan) -> tuple[Sketch | None, list[Violation]]:
    """The sketch of a plan, and what no tool can express; without a grid there is no sketch."""
    grid = grid_of(plan)
    if grid is None:
        return None, [_no_grid(plan)]
    level = _levels(plan) if grid.shard > 1 else frozenset[Level](("none",))
    sp = {each.sp for each in plan.layer_plans.values()} if grid.tp > 1 else {False}
    found = [*_devices(plan, grid), *_batch(plan, grid), *_order(plan, grid)]
    if grid.cp > 1:
        rule = "devices share the tokens of each sample, which is not exported"
        found.append(wrong("layer_plans", grid.cp, rule, "cp = 1"))
    if len(level) > 1:
        legal = 'one for all layers (parallel.level = "params")'
        rule = "differ by layer, and tools have one level for all"
        found.append(wrong("layer_plans", sorted(level), f"levels {rule}", legal))
    if len(sp) > 1:
        rule = "is set for some layers, and tools split tokens of all or none"
        found.append(wrong("layer_plans", "sp", rule, "parallel.sp = true, or false"))
    sketch = Sketch(plan=plan, grid=grid, level=min(level), sp=True in sp)
    dealt = {_ep(plan, name) for stage in sketch.blocks for name in stage}
    if len(dealt) > 1:
        rule = "differ by layer, and tools deal out the experts of all layers alike"
        legal = f"one for all that have experts (parallel.ep = {max(dealt)})"
        found.append(wrong("layer_plans", sorted(dealt), f"numbers of ep {rule}", legal))
    offloaded = sorted({what for each in plan.layer_plans.values() for what in each.offload})
    if offloaded:
        rule = "are offloaded, which is not exported"
        found.append(wrong("layer_plans", offloaded, rule, "nothing offloaded"))
    if plan.precision == "fp64":
        rule = "is no precision of these tools"
        found.append(wrong("precision", "fp64", rule, '"bf16" or "fp32" (train.precision)'))
    return msgspec.structs.replace(sketch, ep=max(dealt)), found


def _ep(plan: Plan, name: str) -> int:
    degrees = even_degrees(plan.layer_plans[name].split)
    return 1 if degrees is None else degrees.ep


def _levels(plan: Plan) -> frozenset[Level]:
    return frozenset(each.level for each in plan.layer_plans.values())


def _no_grid(plan: Plan) -> Violation:
    """Why layers are not all split alike: the first that is not."""
    first: Degrees | None = None
    for index, stage in enumerate(plan.stages):
        for name in stage.layers:
            found = even_degrees(plan.layer_plans[name].split)
            if found is None:
                rule = "is uneven, or over axes or in an order that tools do not have"
                legal = "replicas of shards of tensor parts, all of one size"
                return wrong(f"layer_plans.{name}.split", None, rule, legal)
            if first is not None and found.n_devices != first.n_devices:
                rule = f"are {found.n_devices}, and those of stage 0 {first.n_devices}"
                legal = "as many devices in every stage"
                path = f"stages[{index}].placements"
                return wrong(path, found.n_devices, f"{rule}: tools have one width", legal)
            if first is not None and found != first:
                rule = "has other degrees than the first layer, and tools have one mesh"
                legal = f"{first.replica} x {first.shard} x {first.tp}"
                return wrong(f"layer_plans.{name}.split", None, rule, f"{legal} as there")
            first = found
    rule = "share some of their devices, or list them in another order than their layers"
    return wrong("stages", None, rule, "stages on devices of their own, or on the same")


def _devices(plan: Plan, grid: Grid) -> Iterator[Violation]:
    unused = plan.search.unused_devices if plan.search is not None else ()
    if unused:
        rule = f"stay unused: {list(unused)}; a tool's processes all take part"
        legal = f"a plan for --devices {len(grid.devices)}, or for all"
        yield wrong("search.unused_devices", len(unused), rule, legal)
    elif grid.devices != tuple(range(len(grid.devices))):
        rule = "are in another order than a tool's ranks"
        legal = "0, 1, 2, ... over stages, replicas, shards and tensor parts"
        yield wrong("stages", list(grid.devices), rule, legal)


def _batch(plan: Plan, grid: Grid) -> Iterator[Violation]:
    passes = grid.degrees.data * plan.microbatches
    if plan.global_batch % passes:
        rule = (
            f"is not {grid.degrees.data} data ranks x {plan.microbatches} microbatches of one size"
        )
        below = plan.global_batch // passes * passes
        legal = f"{f'{below} or ' if below else ''}{below + passes} (train.global_batch)"
        yield wrong("global_batch", plan.global_batch, rule, legal)
    if plan.token_slices:
        rule = "cut microbatches into slices, which no tool has"
        yield wrong("token_slices", list(plan.token_slices), rule, "an order over whole samples")


def _order(plan: Plan, grid: Grid) -> Iterator[Violation]:
    """Actions that are not those of the order's name: a plan that was edited by hand.

    Orders that are made for given costs are left to the tool, which does not know them.
    """
    expected: Ranks = (accumulation_order(plan.microbatches),)
    if grid.pp > 1:
        order = ORDERS.get(plan.order_name)
        if order is None or order.by_costs:
            return
        if (why := order.refused(grid.pp, plan.microbatches)) is not None:
            yield wrong("order_name", order.name, f"is not possible: {why}", "another order")
            return
        expected = as_named(plan, grid)
    if played_by(plan, grid) != expected:
        rule = "plays other actions than its name says, and a tool is told the name alone"
        yield wrong("order", plan.order_name or None, rule, "the order as it was planned")
