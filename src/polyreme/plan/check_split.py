"""Whether a plan's layers are split in a way that can be run: one grid, parts that layers allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from ..errors import Violation
from ..graph.layer import LayerGraph
from .degrees import refused_cp, refused_tp
from .grid import INNER_AXES, Degrees, even_degrees, grid_of, rows_of
from .ir import AXES, OFFLOADED, LayerPlan, Plan, ShardTree, axes, devices

_RUN = tuple(name for name, _, runs in AXES if runs and name in INNER_AXES)


def split_violations(plan: Plan, *, unlike: bool = False) -> Iterator[Violation]:
    """What the format can say of splits and nothing can run yet: unlike layers, other axes.

    With `unlike` what can be priced is right: such layers, on devices of their stage, cp and ep.
    """
    found: Counter[Degrees] = Counter()
    of: dict[ShardTree, Degrees | None] = {}
    wrong = False
    for name, layer_plan in distinct(plan).items():
        path, split = f"layer_plans.{name}", layer_plan.split
        if split not in of:
            of[split] = even_degrees(split)
        degrees = of[split]
        known = (*INNER_AXES, "ep") if unlike else _RUN
        if foreign := [axis for axis in axes(split) if axis not in known]:
            rule = f"needs {', '.join(foreign)}, which is not executable yet"
            yield _wrong(f"{path}.split", foreign, rule, ", ".join(known))
        elif degrees is None:
            rule = "is uneven, or does not split over replica, shard and tp in this order"
            yield _wrong(f"{path}.split", list(devices(split)), rule, "even parts")
        wrong = wrong or degrees is None
        if degrees is not None:
            found[degrees.alone] += 1
            yield from _own_violations(path, layer_plan, degrees)
        if layer_plan.offload not in (OFFLOADED.values() if unlike else (OFFLOADED["none"],)):
            legal = " or ".join(map(_named, OFFLOADED.values() if unlike else (frozenset(),)))
            what = sorted(layer_plan.offload)
            yield _wrong(f"{path}.offload", what, "is not executable yet", legal)
    if unlike:
        if not wrong and _complete(plan) and rows_of(plan) is None:
            rule = "has other devices than its layers, or shares some with another stage"
            yield _wrong("stages", None, rule, "rows of devices, all alike or apart")
    elif len(found) > 1:
        yield _unlike(plan, of)
    elif len({layer_plan.sp for layer_plan in plan.layer_plans.values()}) > 1:
        rule = "splits tokens between tensor parts in some layers only"
        yield _wrong("layer_plans", "sp", rule, "sp true in all layers, or in none")
    elif found and not wrong:
        yield from _placement_violations(plan)


def _unlike(plan: Plan, of: Mapping[ShardTree, Degrees | None]) -> Violation:
    """Layers of different degrees: the first two, and the stages that they are in."""
    stages = {name: index for index, stage in enumerate(plan.stages) for name in stage.layers}
    first: dict[Degrees, str] = {}
    for name in (*stages, *plan.layer_plans):
        layer_plan = plan.layer_plans.get(name)
        degrees = None if layer_plan is None else of[layer_plan.split]
        if degrees is not None:
            first.setdefault(degrees.alone, name)
    (some, one), (others, other) = list(first.items())[:2]

    def where(name: str) -> str:
        return f'layer "{name}"' + (f" of stage {stages[name]}" if name in stages else "")

    rule = f"{where(other)} has other degrees ({_shown(others)}) than {where(one)} ({_shown(some)})"
    legal = "the same replica, shard and tp everywhere"
    return _wrong("layer_plans", None, f"{rule}, which is not executable yet", legal)


def _named(offload: frozenset[str]) -> str:
    return " + ".join(sorted(offload)) or "nothing"


def _shown(degrees: Degrees) -> str:
    named = {axis: getattr(degrees, axis) for axis in INNER_AXES}
    return ", ".join(f"{axis} {n}" for axis, n in named.items() if n > 1) or "one device"


def tensor_violations(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Degrees of tensor, context and expert parallelism that a layer does not allow."""
    splits = {layer_plan.split: name for name, layer_plan in distinct(plan).items()}
    degrees = {found: name for split, name in splits.items() if (found := even_degrees(split))}
    for tp in sorted({each.tp for each in degrees} - {1}):
        if (refused := refused_tp(graph, tp)) is not None:
            path = f"layer_plans.{refused.layer}.split"
            yield _wrong(path, tp, f"tensor parts: this {refused.rule}", refused.legal)
    for cp in sorted({each.cp for each in degrees} - {1}):
        if (refused := refused_cp(graph, cp)) is not None:
            path = f"layer_plans.{refused.layer}.split"
            yield _wrong(path, cp, f"shares of tokens: this {refused.rule}", refused.legal)

    dealt: dict[int, int] = {}
    for name, layer_plan in plan.layer_plans.items():
        if id(layer_plan) not in dealt:
            even = even_degrees(layer_plan.split)
            dealt[id(layer_plan)] = 1 if even is None else even.ep
        ep, experts = dealt[id(layer_plan)], graph.expert_plan(name)
        path = f"layer_plans.{name}.split"
        if ep > 1 and experts is None:
            yield _wrong(path, ep, "devices have experts dealt out: this layer has none", "1")
        elif experts is not None and not experts.legal(ep):
            legal = ", ".join(str(n) for n in range(1, experts.n_experts + 1) if experts.legal(n))
            rule = f"does not divide this layer's {experts.n_experts} experts"
            yield _wrong(path, ep, rule, legal)


def _own_violations(path: str, layer_plan: LayerPlan, degrees: Degrees) -> Iterator[Violation]:
    if layer_plan.sp and degrees.tp == 1:
        rule = "has no tensor parts to split tokens over"
        yield _wrong(f"{path}.sp", True, rule, "false, or tp 2 or more")
    if layer_plan.level != "none" and degrees.shard == 1:
        rule = "shards over one device"
        yield _wrong(f"{path}.level", layer_plan.level, rule, '"none", or shard 2 or more')


def _placement_violations(plan: Plan) -> Iterator[Violation]:
    """Stages lie on the same devices or on none of each other's, named in the splits' order."""
    if _complete(plan) and grid_of(plan) is None:
        placed: dict[int, tuple[int, tuple[int, ...]]] = {}
        for index, stage in enumerate(plan.stages):
            path = f"stages[{index}].placements"
            splits = {
                devices(plan.layer_plans[name].split)
                for name in stage.layers
                if name in plan.layer_plans
            }
            others = [list(split) for split in splits if split != stage.placements[0]]
            if others:
                rule = f"names other devices, or in another order, than its layers: {others[0]}"
                yield _wrong(path, list(stage.placements[0]), rule, "those of its layers")
            for row in stage.placements:
                for device in row:
                    of, before = placed.setdefault(device, (index, row))
                    if before != row:
                        rule = f"shares some devices with stage {of} and not all"
                        yield _wrong(path, list(row), rule, "all of them, or none")
                        break
                else:
                    if len(row) != len(stage.placements[0]):
                        rule = f"has {len(row)} devices, unlike the first one"
                        yield _wrong(path, list(row), rule, f"{len(stage.placements[0])} devices")


def same_orders(plan: Plan) -> Iterator[Violation]:
    """The devices of a pipeline rank share layers or batches, and play one order."""
    rows = rows_of(plan) if _complete(plan) else None
    if rows is None or len(plan.stages) < 2 or len(plan.order) != len(rows.devices):
        return
    ascending = sorted(rows.devices)
    of = dict(zip(ascending, plan.order, strict=True))
    for row in rows.pipes:
        for device in row[1:]:
            if of[device] is not of[row[0]] and of[device] != of[row[0]]:
                path = f"order[{ascending.index(device)}]"
                rule = f"is another than that of device {row[0]}, on the same stages"
                yield _wrong(path, f"device {device}", rule, "one order for each pipeline rank")


def _complete(plan: Plan) -> bool:
    """Whether each layer has a plan and each stage devices; what is missing is said elsewhere."""
    names = [name for stage in plan.stages for name in stage.layers]
    return all(stage.placements for stage in plan.stages) and set(names) <= set(plan.layer_plans)


def distinct(plan: Plan) -> dict[str, LayerPlan]:
    """One layer for each different layer plan."""
    first: dict[int, str] = {}
    for name, layer_plan in plan.layer_plans.items():
        first.setdefault(id(layer_plan), name)
    return {name: plan.layer_plans[name] for name in first.values()}


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)
