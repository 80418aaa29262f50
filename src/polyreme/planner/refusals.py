"""Why a planner is given nothing to choose from: fixes that are impossible, alone or together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..cluster.types import Cluster
from ..errors import Violation
from ..graph.layer import LayerGraph
from ..plan.degrees import legal_degrees, refused_cp, refused_ep, refused_tp
from ..plan.ir import AXES, Workload
from ..plan.options import Parallel, degrees_left
from .stages import balanced

_AXES = ("replica", "shard", "tp", "cp", "pp")


def impossible(
    graph: LayerGraph, cluster: Cluster, workload: Workload, parallel: Parallel
) -> list[Violation]:
    """Every fix that cannot be met here, whatever else is chosen."""
    found = [*_unsupported(parallel), *_order(parallel)]
    found += _impossible(graph, cluster, workload, parallel)
    # Of fixes that are possible alone `nothing_left` says which sizes there are.
    return [*found, *(_microbatch(workload.global_batch, parallel) if found else ())]


def of_the_model(
    graph: LayerGraph, batch: int, parallel: Parallel, n_devices: int
) -> list[Violation]:
    """Fixes that model or batch do not allow, whatever is wrong with the others."""
    found = [*_uncuttable(graph, parallel, n_devices), *_microbatch(batch, parallel)]
    return [*found, *unsliced(graph, parallel)]


def allowed_degrees(
    graph: LayerGraph, parallel: Parallel, n_devices: int
) -> Mapping[str, Sequence[int]]:
    """Degrees of each axis that the model's layers allow, up to so many devices."""
    most = max(1, len(graph.layers) // parallel.pipeline.chunks)
    found: dict[str, Sequence[int]] = {"pp": range(1, min(most, n_devices) + 1)}
    found["tp"] = [each for each in legal_degrees(graph, n_devices) if each <= n_devices]
    ends = [layer.splits.get("shard", n_devices) for layer in graph.layers]
    found["shard"] = range(1, min([n_devices, *ends]) + 1)
    return found


def _microbatch(batch: int, parallel: Parallel) -> Iterator[Violation]:
    size = parallel.microbatch
    if size is not None and size > batch:
        rule = f"is more samples than train.global_batch, {batch}"
        legal = f"at most {batch}, into which the samples of a data rank can be cut"
        yield _wrong("microbatch", size, rule, legal)


def inside(parallel: Parallel) -> int:
    """Devices that one share of the batch takes."""
    return (parallel.cp or 1) * (parallel.tp or 1) * (parallel.pp or 1)


def microbatch_counts(
    samples: tuple[int, int], microbatch: int | None, *, whole: bool = False
) -> tuple[int, ...]:
    """Numbers of microbatches of a data rank, fewest first; (fewest, most) samples are its.

    Their largest size is the fixed one, or a power of two at most, or all samples (with `whole`
    only that). Each rank must have a sample for each.
    """
    fewest, most = samples
    if microbatch is not None:
        count = math.ceil(most / microbatch)
        met = math.ceil(most / count) == microbatch and count <= fewest
        return (count,) if met else ()
    sizes = [most] if whole else [most, *(2**power for power in range(most.bit_length()))]
    counts = {math.ceil(most / size) for size in sizes if size <= most}
    return tuple(sorted(count for count in counts if count <= fewest))


def samples_of(batch: int, n_ranks: int) -> tuple[int, int]:
    """The fewest and the most samples that one of so many data ranks has."""
    return batch // n_ranks, math.ceil(batch / n_ranks)


def _unsupported(parallel: Parallel) -> Iterator[Violation]:
    for axis, _, runs in AXES:
        planned = axis in ("cp", "ep") and parallel.layouts == "unlike"
        degree = None if runs or planned else getattr(parallel, axis)
        if degree is not None and degree > 1:
            yield _wrong(axis, degree, "is not executable yet", "1, or unset")


def _order(parallel: Parallel) -> Iterator[Violation]:
    """What is wrong with the order that was asked for."""
    yield from (fault for fault in parallel.check() if fault.path == "parallel.order")


def unsliced(graph: LayerGraph, parallel: Parallel) -> Iterator[Violation]:
    """What an order of slices of tokens asks of the model and its layers."""
    if (parallel.pp or 1) == 1 or parallel.pipeline.slices == 1:
        return
    if not graph.sliced:
        rule = "needs slices of tokens, and the model's layers do not work on tokens behind others"
        legal = "an order over whole samples, or a causal language model"
        yield _wrong("order", parallel.order, rule, legal)
    if parallel.recompute == "all":
        yield _wrong("recompute", "all", "does not go with slices of tokens", '"none"')
    if parallel.sp:
        yield _wrong("sp", True, "does not go with slices of tokens", "false")


def _impossible(
    graph: LayerGraph, cluster: Cluster, workload: Workload, parallel: Parallel
) -> Iterator[Violation]:
    slow = [each for each in cluster.device_types.values() if not each.host_bandwidth_bytes_s]
    if parallel.offload not in (None, "none") and slow:
        rule = f'needs the bandwidth between device type "{slow[0].name}" and its host'
        legal = f'"none" (or host_bandwidth = "32 GB/s" in [device_types.{slow[0].name}])'
        yield _wrong("offload", parallel.offload, rule, legal)
    within, batch = inside(parallel), workload.global_batch
    if within > cluster.n_devices:
        axis = "pp" if (parallel.pp or 1) > 1 else "tp"
        rule = f"exceeds the {cluster.n_devices} devices of {cluster.name}"
        if (parallel.pp or 1) > 1 and (parallel.tp or 1) > 1:
            rule = f"times tp {parallel.tp} {rule}"
        legal = f"1 to {cluster.n_devices // (within // (getattr(parallel, axis) or 1))}"
        yield _wrong(axis, getattr(parallel, axis), rule, legal)
        yield from _uncuttable(graph, parallel, cluster.n_devices)
        return
    n_devices = cluster.n_devices // within
    yield from _uncuttable(graph, parallel, cluster.n_devices)
    among = n_devices * (parallel.cp or 1)
    if (ep := parallel.ep or 1) > among:
        yield _wrong("ep", ep, f"exceeds the devices of a stage, {among}", f"1 to {among}")
    for axis in ("replica", "shard"):
        degree = getattr(parallel, axis)
        if degree is not None and degree > n_devices:
            rule = f"exceeds the {n_devices} devices of {cluster.name}"
            yield _wrong(axis, degree, rule, f"1 to {n_devices}")
    replica, shard = parallel.replica or 1, parallel.shard or 1
    if max(replica, shard) <= n_devices < replica * shard:
        rule = f"times replica {replica} exceeds the {n_devices} devices of {cluster.name}"
        yield _wrong("shard", shard, rule, f"1 to {n_devices // replica}")
    elif batch < replica * shard <= n_devices:
        rule = f"leaves a device without a sample: train.global_batch is {batch}"
        axis = "replica" if replica > 1 else "shard"
        yield _wrong(axis, getattr(parallel, axis), rule, f"replica x shard at most {batch}")
    for layer in graph.layers:
        limit = layer.splits.get("shard", shard)
        if shard > limit:
            rule = f'exceeds what layer "{layer.name}" allows'
            yield _wrong("shard", shard, rule, f"1 to {limit}")
            break


def _uncuttable(graph: LayerGraph, parallel: Parallel, cluster_devices: int) -> Iterator[Violation]:
    """Degrees that the model's layers do not allow."""
    tp, pp = parallel.tp or 1, parallel.pp or 1
    allowed = allowed_degrees(graph, parallel, cluster_devices)

    def left(axis: str, degree: int) -> str:
        fixed = (each for name in _AXES if name != axis and (each := getattr(parallel, name)))
        return degrees_left(allowed[axis], math.prod(fixed), cluster_devices, degree)

    if (refused := refused_tp(graph, tp)) is not None:
        yield _wrong("tp", tp, refused.rule, left("tp", tp))
    if (refused := refused_cp(graph, parallel.cp or 1)) is not None:
        yield _wrong("cp", parallel.cp, refused.rule, refused.legal)
    if (refused := refused_ep(graph, parallel.ep or 1)) is not None:
        yield _wrong("ep", parallel.ep, refused.rule, refused.legal)
    elif parallel.shard and parallel.shard * (parallel.cp or 1) % (parallel.ep or 1):
        among = parallel.shard * (parallel.cp or 1)
        rule = f"does not divide the {among} devices that share a replica's batch and tokens"
        both = (n for n in range(1, among + 1) if not among % n and not refused_ep(graph, n))
        yield _wrong("ep", parallel.ep, rule, ", ".join(map(str, both)))
    n_layers, n_stages = len(graph.layers), pp * parallel.pipeline.chunks
    if pp > 1 and n_stages > n_layers:
        rule = f"makes {n_stages} stages, and the model has {n_layers} layers"
        yield _wrong("pp", pp, rule, left("pp", pp))
    elif pp > 1 and parallel.stages is not None and sum(parallel.stages) != n_layers:
        rule = f"has {sum(parallel.stages)} layers, and the model has {n_layers}"
        example = list(balanced([1.0] * n_layers, len(parallel.stages)))
        legal = f"{example} (or any {len(example)} that add up to {n_layers})"
        yield _wrong("stages", list(parallel.stages), rule, legal)


def nothing_left(
    cluster: Cluster, workload: Workload, parallel: Parallel, counts: tuple[int, ...]
) -> Violation:
    """Why fixes that are possible alone leave nothing together, on any of these data ranks."""
    n_devices = min(cluster.n_devices // inside(parallel), workload.global_batch)
    if parallel.level not in (None, "none") and (
        parallel.shard == 1 or parallel.replica == n_devices or n_devices == 1
    ):
        rule = "needs shard 2 or more, and nothing is left to shard over"
        return _wrong("level", parallel.level, rule, '"none"')
    pp, order, batch = parallel.pp or 1, parallel.pipeline, workload.global_batch
    if pp > 1 and (why := order.refused(pp, 2 * pp)):
        others = [n for n in range(2, cluster.n_devices + 1) if not order.refused(n, 2 * n)]
        dividing = [n for n in others if cluster.n_devices % (inside(parallel) // pp * n) == 0]
        legal = _nearest(dividing or others, pp) or "another parallel.order"
        return _wrong("pp", pp, f'is not for order "{order.name}": {why}', legal)

    def tried(microbatch: int | None) -> list[str | None]:
        """What the order says to each number of microbatches that there may be."""
        return [
            order.refused(pp, n) if pp > 1 else None
            for ranks in counts
            for n in microbatch_counts(samples_of(batch, ranks), microbatch)
        ]

    most = max(samples_of(batch, ranks)[1] for ranks in counts)
    sizes = [size for size in range(1, most + 1) if None in tried(size)]
    legal = _nearest(sizes, parallel.microbatch or 1) or "unset it, or another parallel.order"
    found = tried(parallel.microbatch)
    if found and None not in found:
        rule = f'is not for order "{order.name}": {found[0]}'
    elif parallel.microbatch is not None and not found:
        rule = f"does not cut the {most} samples of a data rank into parts as equal as can be"
    else:
        legal = "unset one of the fixed degrees"
        return _wrong("replica", parallel.replica, "leaves no plan", legal)
    return _wrong("microbatch", parallel.microbatch, rule, legal)


def _nearest(values: Sequence[int], to: int) -> str:
    """The eight that are nearest."""
    return ", ".join(map(str, sorted(sorted(values, key=lambda value: abs(value - to))[:8])))


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"parallel.{field}", value=value, rule=rule, legal=legal)
