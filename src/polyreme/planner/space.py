"""What is offered: every draft that the user's fixes, the devices and the batch leave."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError
from ..graph.layer import LayerGraph
from ..plan.grid import even_split
from ..plan.ir import (
    BUCKET_BYTES,
    OFFLOADED,
    LayerPlan,
    Level,
    Offload,
    Plan,
    Stage,
    Workload,
    accumulation_order,
)
from ..plan.options import Parallel
from ..plan.order import ORDERS
from ..plan.order.kind import Ranks, with_updates
from .draft import Draft, Strategy
from .refusals import impossible, inside, microbatch_counts, nothing_left, samples_of
from .stages import balanced

SHARDED_LEVELS: tuple[Level, ...] = ("optimizer", "grads", "params")
ALL_COUNTS_UP_TO = 8  # devices; beyond, only counts that divide the number of devices


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """Strategies that are offered to every layer and how a step may be played.

    Layers of `normed` take statistics over their microbatch: they are never run a second time,
    and unless the user fixes the microbatch it is as large as it can be. `pp` pipeline ranks play
    `order` over stages of so many layers (`sizes`). `parallel` says how all of them exchange. If
    `unlike`, each layer may have any layout of `strategies`, else all have one; where ranks have
    unlike numbers of devices, `rows` are these, and layers any layout of as many. `experts` has the
    layers that have some, and how many: these may be dealt out, to as many devices as divide them.
    """

    layers: tuple[str, ...]
    normed: frozenset[str] = frozenset()
    experts: Mapping[str, int] = {}
    strategies: tuple[Strategy, ...]
    n_devices: int
    workload: Workload
    microbatch: int | None
    parallel: Parallel = Parallel()
    pp: int = 1
    order: str = ""
    sizes: tuple[int, ...] = ()
    unlike: bool = False
    rows: tuple[int, ...] = ()

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The layers of each stage; none where all are one."""
        ends = list(accumulate(self.sizes, initial=0))
        return tuple(self.layers[start:end] for start, end in pairwise(ends))

    def microbatches(self, n_ranks: int) -> tuple[int, ...]:
        """Numbers of microbatches for so many data ranks, fewest first."""
        samples = samples_of(self.workload.global_batch, n_ranks)
        return microbatch_counts(samples, self.microbatch, whole=bool(self.normed))

    def counts(self, n_ranks: int) -> tuple[int, ...]:
        """Numbers of microbatches that the order allows too."""
        found = self.microbatches(n_ranks)
        if not self.order:
            return found
        return tuple(n for n in found if not ORDERS[self.order].refused(self.pp, n))

    def drafts(self) -> Iterator[Draft]:
        """Drafts in which all layers run alike, the simplest first."""
        for strategy in self.strategies:
            for microbatches in self.counts(strategy.data):
                known = {each: self._nearest(strategy, *each) for each in self._sorts}
                alike = {name: known[self._sort(name)] for name in self.layers}
                yield self.draft(alike, microbatches)

    def allows(self, name: str, strategy: Strategy) -> bool:
        """Whether a strategy that is offered to all may be this layer's."""
        return strategy == self._nearest(strategy, *self._sort(name))

    @property
    def _sorts(self) -> set[tuple[bool, int]]:
        return {self._sort(name) for name in self.layers}

    def _sort(self, name: str) -> tuple[bool, int]:
        """What tells layers apart in what they may do: statistics, and the number of experts."""
        return name in self.normed, self.experts.get(name, 1)

    def _nearest(self, strategy: Strategy, normed: bool, n_experts: int) -> Strategy:
        """The strategy as far as such a layer may run so."""
        if strategy.recompute and normed:
            strategy = msgspec.structs.replace(strategy, recompute=False)
        ep = strategy.ep
        if self.parallel.ep is not None and n_experts % self.parallel.ep == 0:
            ep = self.parallel.ep
        elif n_experts % ep:
            ep = 1
        return strategy if ep == strategy.ep else msgspec.structs.replace(strategy, ep=ep)

    def draft(
        self,
        strategies: Mapping[str, Strategy],
        microbatches: int,
        stages: tuple[tuple[str, ...], ...] | None = None,
    ) -> Draft:
        """One of the space; of its own stages unless others are given."""
        return Draft(
            strategies=strategies,
            pp=self.pp,
            order=self.order,
            stages=self.stages if stages is None else stages,
            holders=ORDERS[self.order].placements(self.pp) if self.order else ((0,),),
            microbatches=microbatches,
            global_batch=self.workload.global_batch,
            bucket_bytes=self.parallel.bucket_bytes or 0,
            overlap=self.parallel.overlap is not False,
            prefetch=self.parallel.prefetch is not False,
            decouple=self.parallel.decouple,
            priority=self.parallel.priority is not False,
        )


def write_plan(draft: Draft, workload: Workload) -> Plan:
    """The draft on the first devices of the cluster, stage by stage."""
    rows = [tuple(range(first, end)) for first, end in pairwise(accumulate((0, *draft.rows)))]
    names = draft.stages or (tuple(draft.strategies),)
    placed = [tuple(rows[pipe] for pipe in pipes) for pipes in draft.holders]
    stages = [
        Stage(layers=layers, placements=placements)
        for layers, placements in zip(names, placed, strict=True)
    ]
    known: dict[tuple[Strategy, tuple[int, ...]], LayerPlan] = {}
    layer_plans = {}
    for stage in stages:
        devices = stage.placements[0]
        for name in stage.layers:
            how = draft.strategies[name]
            if (how, devices) not in known:
                known[how, devices] = LayerPlan(
                    split=even_split(devices, how.degrees),
                    sp=how.sp,
                    level=how.level,
                    recompute=how.recompute,
                    offload=OFFLOADED[how.offload],
                )
            layer_plans[name] = known[how, devices]
    ranks: Ranks = (accumulation_order(draft.microbatches),)
    if draft.stages:
        ranks = with_updates(ORDERS[draft.order], draft.pp, draft.actions)
    order = [actions for actions, row in zip(ranks, rows, strict=True) for _ in row]
    return Plan(
        stages=tuple(stages),
        layer_plans=layer_plans,
        order=tuple(order),
        order_name=draft.order,
        token_slices=draft.token_slices,
        microbatches=draft.microbatches,
        global_batch=draft.global_batch,
        seq_len=workload.seq_len,
        precision=workload.precision,
        bucket_bytes=draft.bucket_bytes or BUCKET_BYTES,
        overlap=draft.overlap,
        prefetch=draft.prefetch,
        decouple=bool(draft.decouple),
        priority=draft.priority,
    )


def offer(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    parallel: Parallel,
    *,
    all_devices: bool = False,
    seconds: Mapping[str, float] | None = None,
) -> Space:
    """The space that the user's fixes leave; with `all_devices`, as many of them as can be used.

    `seconds` of each kind of layer balance stages (unset: all layers count alike).

    Raises:
        ConfigError: a fix is impossible here, or together they leave nothing.
    """
    if violations := impossible(graph, cluster, workload, parallel):
        raise ConfigError(violations)
    space = Space(
        layers=tuple(layer.name for layer in graph.layers),
        normed=frozenset(layer.name for layer in graph.layers if layer.batch_statistics),
        experts=_experts(graph),
        strategies=_strategies(graph, cluster, workload, parallel, all_devices),
        n_devices=cluster.n_devices,
        workload=workload,
        microbatch=parallel.microbatch,
        parallel=parallel,
        pp=parallel.pp or 1,
        order=parallel.pipeline.name if (parallel.pp or 1) > 1 else "",
        sizes=_stage_sizes(graph, parallel, seconds),
    )
    if next(space.drafts(), None) is None:
        counts = _device_counts(cluster, workload, parallel, all_devices)
        raise ConfigError([nothing_left(cluster, workload, parallel, tuple(counts))])
    return space


def _stage_sizes(
    graph: LayerGraph, parallel: Parallel, seconds: Mapping[str, float] | None
) -> tuple[int, ...]:
    if (parallel.pp or 1) == 1:
        return ()
    if parallel.stages is not None:
        return parallel.stages
    each = [1.0 if seconds is None else seconds[layer.kind] for layer in graph.layers]
    return balanced(each, (parallel.pp or 1) * parallel.pipeline.chunks)


def _strategies(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    parallel: Parallel,
    all_devices: bool,
) -> tuple[Strategy, ...]:
    """Simplest first: all on devices, without recomputation, few shards, the least level."""
    recomputes = {None: (False, True), "none": (False,), "all": (True,)}[parallel.recompute]
    if (parallel.pp or 1) > 1 and parallel.pipeline.slices > 1 and parallel.recompute is None:
        recomputes = (False,)  # passes over slices of tokens are kept
    largest_shard = min(layer.splits.get("shard", cluster.n_devices) for layer in graph.layers)
    meshes = [
        (n_ranks // shard, shard)
        for n_ranks in _device_counts(cluster, workload, parallel, all_devices)
        for shard in divisors(n_ranks)
        if shard <= largest_shard
        and shard * (parallel.cp or 1) % (parallel.ep or 1) == 0
        and parallel.shard in (None, shard)
        and parallel.replica in (None, n_ranks // shard)
    ]
    return tuple(
        Strategy(
            replica=replica,
            shard=shard,
            cp=parallel.cp or 1,
            tp=parallel.tp or 1,
            sp=bool(parallel.sp),
            level=level,
            recompute=recompute,
            offload=offload,
            ep=ep,
        )
        for offload in _offloads(cluster, parallel)
        for recompute in recomputes
        for replica, shard in sorted(meshes, key=lambda mesh: (mesh[1], mesh[0]))
        for level, ep in _ways(graph, shard, parallel)
    )


def _ways(graph: LayerGraph, shard: int, parallel: Parallel) -> list[tuple[Level, int]]:
    """Levels, and to how many devices experts are dealt out.

    Where they are, shards that split nothing else are no replicas.
    """
    levels, dealt = _levels(shard, parallel), _dealt(graph, shard * (parallel.cp or 1), parallel)
    found = [(level, ep) for level in levels for ep in dealt]
    if len(dealt) > 1 and "none" not in levels and parallel.level in (None, "none"):
        found += [("none", ep) for ep in dealt if ep > 1 or parallel.level == "none"]
    return found


def _experts(graph: LayerGraph) -> Mapping[str, int]:
    plans = {layer.name: graph.expert_plan(layer.name) for layer in graph.layers}
    return {name: plan.n_experts for name, plan in plans.items() if plan is not None}


def _dealt(graph: LayerGraph, n_devices: int, parallel: Parallel) -> tuple[int, ...]:
    """To how many of a replica's devices experts may be dealt out: where no plan has to run, any.

    Layers that have none stay as they are, so 1 is among them.
    """
    if parallel.ep is not None:
        return (1, parallel.ep) if parallel.ep > 1 else (1,)
    if parallel.layouts != "unlike":
        return (1,)
    counts = {*_experts(graph).values()}
    return tuple(ep for ep in divisors(n_devices) if ep == 1 or any(n % ep == 0 for n in counts))


def _offloads(cluster: Cluster, parallel: Parallel) -> tuple[Offload, ...]:
    """What may lie in hosts' memory: where no plan has to run, anything, the least first."""
    if parallel.offload is not None:
        return (parallel.offload,)
    known = all(each.host_bandwidth_bytes_s for each in cluster.device_types.values())
    return tuple(OFFLOADED) if known and parallel.layouts == "unlike" else ("none",)


@functools.cache
def divisors(n: int) -> tuple[int, ...]:
    """All of them, the least first."""
    return tuple(each for each in range(1, n + 1) if n % each == 0)


def _levels(shard: int, parallel: Parallel) -> tuple[Level, ...]:
    """Levels for a degree of sharding; without a level it only renames replicas.

    An order that keeps weights in versions has them whole.
    """
    if shard == 1 or ((parallel.pp or 1) > 1 and not parallel.pipeline.synchronous):
        offered: tuple[Level, ...] = ("none",)
    elif parallel.shard is None and parallel.replica is None:
        offered = SHARDED_LEVELS
    else:
        offered = ("none", *SHARDED_LEVELS)
    return tuple(level for level in offered if parallel.level in (None, level))


def _device_counts(
    cluster: Cluster, workload: Workload, parallel: Parallel, all_devices: bool
) -> list[int]:
    n_devices = cluster.n_devices // inside(parallel)
    most = min(n_devices, workload.global_batch)
    if parallel.replica is not None and parallel.shard is not None:
        return [parallel.replica * parallel.shard]
    step = parallel.replica or parallel.shard or 1
    if all_devices:
        return [most // step * step]
    if n_devices <= ALL_COUNTS_UP_TO:
        return list(range(1, most + 1))
    counts = {count for count in range(1, most + 1) if n_devices % count == 0}
    return sorted({*counts, most, *range(step, most + 1, step)} if step > 1 else {*counts, most})
