"""What is priced: how each layer runs, before devices are named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from ..errors import ConfigError, Violation
from ..plan.describe import Way, describe_stages, describe_step, describe_way
from ..plan.grid import INNER_AXES, Degrees, even_degrees, rows_of
from ..plan.ir import BUCKET_BYTES, OFFLOADED, Level, Offload, Plan
from ..plan.order.kind import Ranks

BUCKET_SIZES: tuple[int, ...] = tuple(
    2**power for power in range(18, 29)
)  # to choose from: 256 KiB to 256 MiB
_OFFLOAD_OF = {causes: name for name, causes in OFFLOADED.items()}


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How one layer runs on replica x shard x cp x tp devices.

    With `offload` "optimizer" its optimizer states lie in hosts' memory, and come to devices to be
    updated; with "parameters" so do its parameters and gradients, which come for its passes too.
    Its experts are dealt out to `ep` of shard x cp devices next to each other.

    >>> Strategy(replica=2, shard=3, tp=2).n_devices
    12
    """

    replica: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    sp: bool = False
    level: Level = "none"
    recompute: bool = False
    offload: Offload = "none"
    ep: int = 1

    @property
    def degrees(self) -> Degrees:
        """Into how many parts each axis of a stage cuts it."""
        return Degrees(replica=self.replica, shard=self.shard, cp=self.cp, tp=self.tp, ep=self.ep)

    @property
    def data(self) -> int:
        """Devices that share the batch; those that share its samples count as one."""
        return self.replica * self.shard

    @property
    def copies(self) -> int:
        """Devices that hold the same of a parameter that is cut into shards."""
        return self.replica * self.cp

    @property
    def sharers(self) -> int:
        """Devices that have samples, or tokens of samples, of their own."""
        return self.data * self.cp

    @property
    def n_devices(self) -> int:
        """Devices that hold the layer."""
        return self.sharers * self.tp

    @property
    def halves(self) -> bool:
        """Whether gradients of weights can wait.

        Not where a layer is gathered, fetched from its host or run again.
        """
        return self.level == "none" and not self.recompute and not self.fetches

    @property
    def fetches(self) -> bool:
        """Whether its parameters come from hosts' memory for its passes."""
        return self.offload == "parameters"

    @property
    def layout(self) -> Strategy:
        """Where its devices and its tokens are, and nothing else of it."""
        return msgspec.structs.replace(self, level="none", recompute=False, offload="none", ep=1)

    @property
    def of_experts(self) -> Strategy:
        """How those who hold the same experts hold them: of `ep` devices each has others."""
        degrees = self.degrees
        return msgspec.structs.replace(
            self,
            shard=self.shard // degrees.ep_shards,
            cp=self.cp // degrees.ep_contexts,
            ep=1,
        )

    @property
    def parts(self) -> int:
        """Into how many parts the layer's states are cut."""
        return self.shard if self.level != "none" else 1


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy for each layer, in the graph's order, and how a step is played.

    `stages` holds the layers of each stage (none: all are one), `holders` the pipeline ranks of
    each; `order` names the order, `actions` are those of each pipeline rank where they are given,
    `token_slices` how many tokens each slice has (unset: as even as can be). `bucket_bytes` of 0,
    and `decouple` of None, leave these to the cost model.
    """

    strategies: Mapping[str, Strategy]
    pp: int = 1
    order: str = ""
    stages: tuple[tuple[str, ...], ...] = ()
    holders: tuple[tuple[int, ...], ...] = ((0,),)
    actions: Ranks = ()
    token_slices: tuple[int, ...] = ()
    microbatches: int
    global_batch: int
    bucket_bytes: int
    overlap: bool
    prefetch: bool = True
    decouple: bool | None = False
    priority: bool = True

    @property
    def strategy(self) -> Strategy:
        """That of the first layer; degrees are the same for all if layers are alike."""
        return next(iter(self.strategies.values()))

    @property
    def is_alike(self) -> bool:
        """Whether all layers are laid out as the first."""
        return len({each.layout for each in set(self.strategies.values())}) == 1

    @property
    def takes_turns(self) -> bool:
        """Whether gradients of a layer come when its saved tensors go: of one backward pass."""
        return self.microbatches == 1 and not self.stages

    @property
    def most_bucket_bytes(self) -> int:
        """At what size buckets are closed, or at most will be."""
        if self.bucket_bytes or self.strategy.sharers == 1:
            return self.bucket_bytes or BUCKET_BYTES
        return max(BUCKET_SIZES)

    @property
    def offloads(self) -> bool:
        """Whether anything lies in hosts' memory; what that takes is never measured."""
        return any(each.offload != "none" for each in set(self.strategies.values()))

    @property
    def fetches(self) -> bool:
        """Whether parameters of any layer do."""
        return any(each.fetches for each in {id(s): s for s in self.strategies.values()}.values())

    @property
    def deals_out(self) -> bool:
        """Whether any layer's experts are dealt out."""
        return any(each.ep > 1 for each in set(self.strategies.values()))

    @property
    def rows(self) -> tuple[int, ...]:
        """Devices of each pipeline rank, which may differ where layers are laid out unlike."""
        found = [self.strategy.n_devices] * self.pp
        for names, pipes in zip(self.stages, self.holders, strict=False):
            for pipe in pipes:
                found[pipe] = self.strategies[names[0]].n_devices
        return tuple(found)

    @property
    def n_devices(self) -> int:
        """Devices of all stages."""
        return sum(self.rows)

    @property
    def samples(self) -> int:
        """Samples of the data rank that has most."""
        return math.ceil(self.global_batch / self.strategy.data)

    def layers_of(self, pipe: int) -> tuple[str, ...]:
        """Layers of a pipeline rank."""
        if not self.stages:
            return tuple(self.strategies)
        held = [s for s, pipes in zip(self.stages, self.holders, strict=True) if pipe in pipes]
        return tuple(name for stage in held for name in stage)

    @property
    def microbatch_sizes(self) -> Mapping[int, int]:
        """Size of a microbatch on that rank -> how many have it, the largest size first."""
        size, larger = divmod(self.samples, self.microbatches)
        sizes = {size + 1: larger, size: self.microbatches - larger}
        return {size: count for size, count in sizes.items() if count and size}

    @property
    def rounds(self) -> int:
        """Microbatches that a pipeline rank plays of each of its stages."""
        return math.ceil(self.microbatches / max(map(len, self.holders)))

    @property
    def microbatch(self) -> int:
        """Samples of the largest microbatch."""
        return self.microbatch_of(self.strategy)

    def microbatch_of(self, strategy: Strategy) -> int:
        """Samples of the largest microbatch of a layer that runs so."""
        return math.ceil(math.ceil(self.global_batch / strategy.data) / self.microbatches)


def read_draft(plan: Plan) -> Draft:
    """The strategies of a plan.

    Raises:
        ConfigError: the plan has splits or stages that cannot be priced yet.
    """
    rows = rows_of(plan)
    plans = {id(each): each for each in plan.layer_plans.values()}
    degrees = {key: even_degrees(each.split) for key, each in plans.items()}
    odd = [name for name, each in plan.layer_plans.items() if degrees[id(each)] is None]
    if rows is None or odd:
        rule = "is split in a way that cannot be priced yet"
        legal = "even parts over replica, shard (ep), cp (ep) and tp, of all devices of its stage"
        paths = [f"plan.layer_plans.{name}.split" for name in odd] or ["plan.stages"]
        raise ConfigError(
            [Violation(path=path, value=None, rule=rule, legal=legal) for path in paths]
        )
    for name, each in plan.layer_plans.items():
        if each.offload not in _OFFLOAD_OF:
            path, rule = f"plan.layer_plans.{name}.offload", "cannot be priced yet"
            legal = " or ".join(str(sorted(causes)) for causes in _OFFLOAD_OF)
            what = sorted(each.offload)
            raise ConfigError([Violation(path=path, value=what, rule=rule, legal=legal)])
    known = {
        key: Strategy(
            replica=found.replica,
            shard=found.shard,
            cp=found.cp,
            tp=found.tp,
            ep=found.ep,
            sp=each.sp,
            level=each.level,
            recompute=each.recompute,
            offload=_OFFLOAD_OF[each.offload],
        )
        for key, each in plans.items()
        if (found := degrees[key]) is not None
    }
    ascending = sorted(rows.devices)
    several = len(plan.stages) > 1
    return Draft(
        strategies={name: known[id(each)] for name, each in plan.layer_plans.items()},
        pp=rows.pp,
        order=plan.order_name,
        stages=tuple(stage.layers for stage in plan.stages) if several else (),
        holders=rows.holders,
        actions=tuple(plan.order[ascending.index(row[0])] for row in rows.pipes) if several else (),
        token_slices=plan.token_slices,
        microbatches=plan.microbatches,
        global_batch=plan.global_batch,
        bucket_bytes=plan.bucket_bytes,
        overlap=plan.overlap,
        prefetch=plan.prefetch,
        decouple=plan.decouple,
        priority=plan.priority,
    )


def describe_draft(draft: Draft) -> str:
    """The draft in one line, as the plan that it becomes is described."""
    counts = Counter(draft.strategies.values())
    stages = ""
    if draft.stages:
        sizes = [len(names) for names in draft.stages]
        stages = describe_stages(sizes, draft.pp, draft.order, len(draft.token_slices))
    return describe_step(
        {_way(strategy): n for strategy, n in counts.items()},
        stages=stages,
        microbatches=draft.microbatches,
        global_batch=draft.global_batch,
    )


def describe_strategy(strategy: Strategy) -> str:
    """``2 replicas x 4 shards (params), recompute``."""
    return describe_way(_way(strategy))


def _way(strategy: Strategy) -> Way:
    degrees = ((axis, getattr(strategy, axis)) for axis in INNER_AXES)
    return Way(
        degrees=tuple((axis, n) for axis, n in degrees if n > 1),
        data=strategy.data,
        level=strategy.level,
        ep=strategy.ep,
        sp=strategy.sp,
        recompute=strategy.recompute,
        offload=tuple(sorted(OFFLOADED[strategy.offload])),
    )
