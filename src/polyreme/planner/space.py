"""What is offered: every draft that the user's fixes, the devices and the batch leave."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError, Violation
from ..graph.layer import LayerGraph
from ..plan.ir import (
    AXES,
    BUCKET_BYTES,
    LayerPlan,
    Level,
    Plan,
    Stage,
    Workload,
    accumulation_order,
    data_split,
)
from ..plan.options import Parallel
from .draft import Draft, Strategy

SHARDED_LEVELS: tuple[Level, ...] = ("optimizer", "grads", "params")
ALL_COUNTS_UP_TO = 8  # devices; beyond, only counts that divide the number of devices


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Strategies that are offered to every layer and how a step may be played.

    Layers of `normed` take statistics over their microbatch: they are never run a second time,
    and unless the user fixes the microbatch it is as large as it can be.
    """

    layers: tuple[str, ...]
    normed: frozenset[str] = frozenset()
    strategies: tuple[Strategy, ...]
    n_devices: int
    workload: Workload
    microbatch: int | None
    bucket_bytes: int
    overlap: bool

    def microbatches(self, n_ranks: int) -> tuple[int, ...]:
        """Numbers of microbatches for so many data ranks, fewest first.

        Their largest size is the fixed one, or a power of two at most, or all samples of a rank.
        Each rank must have a sample for each.
        """
        fewest, left = divmod(self.workload.global_batch, n_ranks)
        samples = fewest + (1 if left else 0)
        if self.microbatch is not None:
            count = math.ceil(samples / self.microbatch)
            met = math.ceil(samples / count) == self.microbatch and count <= fewest
            return (count,) if met else ()
        sizes = [samples]
        if not self.normed:
            sizes += [2**power for power in range(samples.bit_length())]
        counts = {math.ceil(samples / size) for size in sizes if size <= samples}
        return tuple(sorted(count for count in counts if count <= fewest))

    def drafts(self) -> Iterator[Draft]:
        """Drafts in which all layers run alike, the simplest first."""
        for strategy in self.strategies:
            for microbatches in self.microbatches(strategy.n_devices):
                once = msgspec.structs.replace(strategy, recompute=False)
                yield Draft(
                    strategies={
                        name: once if name in self.normed else strategy for name in self.layers
                    },
                    microbatches=microbatches,
                    global_batch=self.workload.global_batch,
                    bucket_bytes=self.bucket_bytes,
                    overlap=self.overlap,
                )


def write_plan(draft: Draft, workload: Workload) -> Plan:
    """The draft on the first devices of the cluster: one stage."""
    devices = tuple(range(draft.n_devices))
    known: dict[Strategy, LayerPlan] = {}
    for strategy in draft.strategies.values():
        if strategy not in known:
            known[strategy] = LayerPlan(
                split=data_split(strategy.replica, strategy.shard, devices),
                level=strategy.level,
                recompute=strategy.recompute,
            )
    return Plan(
        stages=(Stage(layers=tuple(draft.strategies), placements=(devices,)),),
        layer_plans={name: known[how] for name, how in draft.strategies.items()},
        order=(accumulation_order(draft.microbatches),) * len(devices),
        microbatches=draft.microbatches,
        global_batch=draft.global_batch,
        seq_len=workload.seq_len,
        precision=workload.precision,
        bucket_bytes=draft.bucket_bytes,
        overlap=draft.overlap,
    )


def offer(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    parallel: Parallel,
    *,
    all_devices: bool = False,
) -> Space:
    """The space that the user's fixes leave; with `all_devices`, as many of them as can be used.

    Raises:
        ConfigError: a fix is impossible here, or together they leave nothing.
    """
    violations = [*_unsupported(parallel), *_impossible(graph, cluster, workload, parallel)]
    if violations:
        raise ConfigError(violations)
    space = Space(
        layers=tuple(layer.name for layer in graph.layers),
        normed=frozenset(layer.name for layer in graph.layers if layer.batch_statistics),
        strategies=_strategies(graph, cluster, workload, parallel, all_devices),
        n_devices=cluster.n_devices,
        workload=workload,
        microbatch=parallel.microbatch,
        bucket_bytes=parallel.bucket_bytes or BUCKET_BYTES,
        overlap=True if parallel.overlap is None else parallel.overlap,
    )
    if next(space.drafts(), None) is None:
        raise ConfigError([_nothing_left(cluster, workload, parallel)])
    return space


def _strategies(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    parallel: Parallel,
    all_devices: bool,
) -> tuple[Strategy, ...]:
    """Simplest first: without recomputation, few shards, the least level."""
    recomputes = {None: (False, True), "none": (False,), "all": (True,)}[parallel.recompute]
    largest_shard = min(layer.splits.get("shard", cluster.n_devices) for layer in graph.layers)
    meshes = [
        (n_ranks // shard, shard)
        for n_ranks in _device_counts(cluster, workload, parallel, all_devices)
        for shard in range(1, min(n_ranks, largest_shard) + 1)
        if n_ranks % shard == 0
        and parallel.shard in (None, shard)
        and parallel.replica in (None, n_ranks // shard)
    ]
    return tuple(
        Strategy(replica=replica, shard=shard, level=level, recompute=recompute)
        for recompute in recomputes
        for replica, shard in sorted(meshes, key=lambda mesh: (mesh[1], mesh[0]))
        for level in _levels(shard, parallel)
    )


def _levels(shard: int, parallel: Parallel) -> tuple[Level, ...]:
    """Levels for a degree of sharding; without a level it only renames replicas."""
    if shard == 1:
        offered: tuple[Level, ...] = ("none",)
    elif parallel.shard is None and parallel.replica is None:
        offered = SHARDED_LEVELS
    else:
        offered = ("none", *SHARDED_LEVELS)
    return tuple(level for level in offered if parallel.level in (None, level))


def _device_counts(
    cluster: Cluster, workload: Workload, parallel: Parallel, all_devices: bool
) -> list[int]:
    most = min(cluster.n_devices, workload.global_batch)
    if parallel.replica is not None and parallel.shard is not None:
        return [parallel.replica * parallel.shard]
    step = parallel.replica or parallel.shard or 1
    if all_devices:
        return [most // step * step]
    if cluster.n_devices <= ALL_COUNTS_UP_TO:
        return list(range(1, most + 1))
    counts = {count for count in range(1, most + 1) if cluster.n_devices % count == 0}
    return sorted({*counts, most, *range(step, most + 1, step)} if step > 1 else {*counts, most})


def _unsupported(parallel: Parallel) -> Iterator[Violation]:
    for axis, _, runs in AXES:
        degree = None if runs else getattr(parallel, axis)
        if degree is not None and degree > 1:
            yield _wrong(axis, degree, "is not executable yet", "1, or unset")
    if parallel.sp:
        yield _wrong("sp", True, "needs tp, which is not executable yet", "false, or unset")
    if parallel.order is not None:
        yield _wrong("order", parallel.order, "needs pp, which is not executable yet", "unset")


def _impossible(
    graph: LayerGraph, cluster: Cluster, workload: Workload, parallel: Parallel
) -> Iterator[Violation]:
    n_devices, batch = cluster.n_devices, workload.global_batch
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


def _nothing_left(cluster: Cluster, workload: Workload, parallel: Parallel) -> Violation:
    if parallel.level not in (None, "none"):
        n_devices = min(cluster.n_devices, workload.global_batch)
        if parallel.shard == 1 or parallel.replica == n_devices or n_devices == 1:
            rule = "needs shard 2 or more, and nothing is left to shard over"
            return _wrong("level", parallel.level, rule, '"none"')
    if parallel.microbatch is not None:
        rule = (
            f"does not divide global batch {workload.global_batch} over "
            f"{cluster.n_devices} devices so that each has a sample in every microbatch"
        )
        return _wrong("microbatch", parallel.microbatch, rule, "a smaller one, or unset")
    return _wrong("replica", parallel.replica, "leaves no plan", "unset one of the fixed degrees")


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"parallel.{field}", value=value, rule=rule, legal=legal)
