"""Everything that is wrong with a plan, found before any process starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..cluster.types import Cluster
from ..errors import Violation
from ..graph.layer import LayerGraph
from .check_order import order_violations
from .check_played import slice_violations, version_violations
from .check_said import estimate_violations, name_violations, workload_violations
from .check_split import distinct, same_orders, split_violations, tensor_violations
from .grid import INNER_AXES, Degrees, even_degrees
from .ir import BUCKET_BYTES, Plan, Workload, devices, hash_inputs, stale_inputs


def check(
    plan: Plan,
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload | None = None,
    *,
    unlike: bool = False,
) -> list[Violation]:
    """Every rule that the plan breaks; none means that it can be run.

    With a workload, a plan made for other inputs is one of them; of one for another model it is
    not said which layers differ. With `unlike` layers may be laid out so: it can be priced.
    """
    stale = [] if workload is None else list(_stale(plan, graph, cluster, workload))
    alone = check_alone(plan, cluster, unlike=unlike)
    if workload is not None and "graph" in _differing(plan, graph, cluster, workload):
        return [*stale, *alone]
    layers = [*_layers(plan, graph), *_dependencies(plan, graph)]
    found = [*stale, *layers, *alone, *_twice(plan, graph)]
    if not layers:
        found += [*_ties(plan, graph), *tensor_violations(plan, graph)]
        found += [*slice_violations(plan, graph), *version_violations(plan, graph)]
    return found


def check_alone(plan: Plan, cluster: Cluster | None, *, unlike: bool = False) -> list[Violation]:
    """The rules that a plan breaks whatever the model, on this cluster if it is known."""
    placed = list(_devices(plan, cluster))
    batch = list(_batch(plan))
    found = [*placed, *batch, *split_violations(plan, unlike=unlike)]
    found += estimate_violations(plan, cluster)
    if not placed and not batch:
        orders = [*order_violations(plan), *same_orders(plan)]
        found += [*([] if orders else name_violations(plan)), *orders]
    if not placed and cluster is not None:
        found += _memory(plan, cluster)
    return found


def _differing(
    plan: Plan, graph: LayerGraph, cluster: Cluster, workload: Workload
) -> Sequence[str]:
    return stale_inputs(plan.inputs_hash, hash_inputs(graph, cluster, workload))


def _stale(
    plan: Plan, graph: LayerGraph, cluster: Cluster, workload: Workload
) -> Iterator[Violation]:
    said = list(workload_violations(plan, workload))
    yield from said
    names = _differing(plan, graph, cluster, workload)
    if names := [name for name in names if name != "workload" or not said]:
        rule = f"was made for another {' and '.join(names)}"
        yield _wrong("inputs_hash", plan.inputs_hash, rule, "a plan made anew for these inputs")


def _twice(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """No second forward pass where one moves running statistics."""
    for layer in graph.layers:
        planned = plan.layer_plans.get(layer.name)
        if layer.batch_statistics and planned is not None and planned.recompute:
            rule = "would move the running statistics of its normalisation twice"
            yield _wrong(f"layer_plans.{layer.name}.recompute", True, rule, "false")


def _layers(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Each layer of the graph in one stage, with one layer plan, and no others."""
    known = {layer.name for layer in graph.layers}
    times = Counter(name for stage in plan.stages for name in stage.layers)
    for name in sorted(known - set(times)):
        yield _wrong("stages", name, "is a layer in no stage", "each layer in one stage")
    for name, count in times.items():
        if name not in known:
            rule = f"is no layer of {graph.name}"
            yield _wrong("stages", name, rule, "layers of the model")
        elif count > 1:
            yield _wrong("stages", name, f"stands {count} times", "each layer in one stage")
    for name in sorted(known - set(plan.layer_plans)):
        yield _wrong("layer_plans", name, "has no layer plan", "one for each layer")
    for name in sorted(set(plan.layer_plans) - known):
        yield _wrong("layer_plans", name, f"is no layer of {graph.name}", "layers of the model")
    for index, stage in enumerate(plan.stages):
        if not stage.layers:
            yield _wrong(f"stages[{index}].layers", [], "is empty", "one layer or more")


def _dependencies(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """A layer comes after those whose outputs it reads."""
    names = [name for stage in plan.stages for name in stage.layers]
    position = {name: index for index, name in enumerate(names)}
    for layer in graph.layers:
        for source in {name.rpartition(".")[0] for name in layer.inputs}:
            if position.get(source, -1) > position.get(layer.name, len(names)):
                rule = f'comes before "{source}", whose output it reads'
                yield _wrong("stages", layer.name, rule, "the order of the model")


def _devices(plan: Plan, cluster: Cluster | None) -> Iterator[Violation]:
    """Placements name devices that exist, once each, and the layers' splits the same ones."""
    splits: dict[int, tuple[int, ...]] = {}
    for index, stage in enumerate(plan.stages):
        path = f"stages[{index}].placements"
        if not stage.placements:
            yield _wrong(path, [], "is empty", "the devices of the stage")
            continue
        for placement in stage.placements:
            for device, count in Counter(placement).items():
                if cluster is not None and not 0 <= device < cluster.n_devices:
                    rule = f"is no device of {cluster.name}"
                    yield _wrong(path, device, rule, f"0 to {cluster.n_devices - 1}")
                elif count > 1:
                    yield _wrong(path, device, f"stands {count} times", "each device once")
        for name in stage.layers:
            layer_plan = plan.layer_plans.get(name)
            if layer_plan is None:
                continue
            if id(layer_plan) not in splits:
                splits[id(layer_plan)] = devices(layer_plan.split)
            split = splits[id(layer_plan)]
            if sorted(split) != sorted(stage.placements[0]):
                rule = f"is over {len(split)} devices that are not those of stage {index}"
                legal = "each device of the stage once"
                yield _wrong(f"layer_plans.{name}.split", list(split), rule, legal)


def _batch(plan: Plan) -> Iterator[Violation]:
    if plan.bucket_bytes < 1:
        legal = f"{BUCKET_BYTES} (or any integer >= 1)"
        yield _wrong("bucket_bytes", plan.bucket_bytes, "is not >= 1", legal)
    degrees = [even_degrees(layer_plan.split) for layer_plan in distinct(plan).values()]
    ranks = max((each.data for each in degrees if each is not None), default=1)
    if plan.global_batch < ranks:
        rule = f"leaves a device without a sample: {ranks} share the batch"
        legal = f"{ranks} (or any integer >= {ranks})"
        yield _wrong("global_batch", plan.global_batch, rule, legal)
    most = plan.global_batch // ranks
    low = plan.microbatches < 1
    if low or 0 < most < plan.microbatches:
        rule = "is not >= 1" if low else f"exceeds the samples of a device, {most}"
        legal = "1" if most <= 1 else f"1 (or any integer >= 1 and <= {most})"
        yield _wrong("microbatches", plan.microbatches, rule, legal)


def _ties(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Layers that share parameters cut them alike, in whatever stages they are.

    Their gradients are summed over all stages that hold them.
    """
    owner = {
        whole: layer.name
        for layer in graph.layers
        for whole in layer.params.values()
        if whole not in layer.ties
    }
    for layer in graph.layers:
        for other in sorted({owner[whole] for whole in layer.ties if whole in owner}):
            ours, theirs = plan.layer_plans[layer.name], plan.layer_plans[other]
            if ours.level != theirs.level:
                path = f"layer_plans.{layer.name}.level"
                rule = f'differs from that of "{other}", with which it shares parameters'
                yield _wrong(path, ours.level, rule, f'"{theirs.level}"')
            if ours.offload != theirs.offload:
                path, legal = f"layer_plans.{layer.name}.offload", str(sorted(theirs.offload))
                rule = f'differs from that of "{other}", with which it shares parameters'
                yield _wrong(path, sorted(ours.offload), rule, legal)
            own, wanted = even_degrees(ours.split), even_degrees(theirs.split)
            if None not in (own, wanted) and own != wanted:
                path = f"layer_plans.{layer.name}.split"
                rule = f'has other degrees than "{other}", with which it shares parameters'
                yield _wrong(path, _degrees(own), rule, _degrees(wanted))


def _degrees(found: Degrees | None) -> str:
    """``shard 2 x tp 2``."""
    degrees = [(axis, getattr(found, axis)) for axis in INNER_AXES]
    return " x ".join(f"{axis} {n}" for axis, n in degrees if n > 1) or "one device"


def _memory(plan: Plan, cluster: Cluster) -> Iterator[Violation]:
    """By the plan's own estimate, each device holds what it is given."""
    if plan.estimate is None:
        return
    used = sorted({device for stage in plan.stages for row in stage.placements for device in row})
    if len(plan.estimate.memory) != len(used):
        rule = f"is for {len(plan.estimate.memory)} devices, not {len(used)}"
        yield _wrong("estimate.memory", len(plan.estimate.memory), rule, f"{len(used)} entries")
        return
    have = [
        cluster.device_types[host.device_type].memory_bytes
        for host in cluster.hosts
        for _ in range(host.n_devices)
    ]
    need = [sum(causes.values()) for causes in plan.estimate.memory]
    over = [(need[index] - have[device], index) for index, device in enumerate(used)]
    most, index = max(over)
    if most > 0:
        device = used[index]
        rule = f"exceeds the {have[device]:,} bytes of device {device}"
        yield _wrong(f"estimate.memory[{index}]", need[index], rule, f"at most {have[device]:,}")


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)
