"""What is priced: how each layer runs, before devices are named."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import msgspec

from ..errors import ConfigError, Violation
from ..plan.ir import DataLayout, LayerPlan, Level, Plan, data_layout


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How one layer runs on replica x shard devices.

    >>> Strategy(replica=2, shard=3).n_devices
    6
    """

    replica: int = 1
    shard: int = 1
    level: Level = "none"
    recompute: bool = False

    @property
    def n_devices(self) -> int:
        """Devices that hold the layer."""
        return self.replica * self.shard

    @property
    def parts(self) -> int:
        """Into how many parts the layer's states are cut."""
        return self.shard if self.level != "none" else 1


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """A strategy for each layer, in the graph's order, and how a step is played."""

    strategies: Mapping[str, Strategy]
    microbatches: int
    global_batch: int
    bucket_bytes: int
    overlap: bool

    @property
    def n_devices(self) -> int:
        """Devices of the one stage."""
        return next(iter(self.strategies.values())).n_devices

    @property
    def samples(self) -> int:
        """Samples of the data rank that has most."""
        return math.ceil(self.global_batch / self.n_devices)

    @property
    def microbatch_sizes(self) -> Mapping[int, int]:
        """Size of a microbatch on that rank -> how many have it, the largest size first."""
        size, larger = divmod(self.samples, self.microbatches)
        sizes = {size + 1: larger, size: self.microbatches - larger}
        return {size: count for size, count in sizes.items() if count and size}

    @property
    def microbatch(self) -> int:
        """Samples of the largest microbatch."""
        return math.ceil(self.samples / self.microbatches)


def read_draft(plan: Plan) -> Draft:
    """The strategies of a plan.

    Raises:
        ConfigError: the plan has splits or stages that cannot be priced yet.
    """
    known: dict[int, Strategy | None] = {}
    strategies = {}
    wrong = []
    for name, layer_plan in plan.layer_plans.items():
        if id(layer_plan) not in known:
            layout = data_layout(layer_plan.split)
            known[id(layer_plan)] = None if layout is None else _strategy(layout, layer_plan)
        strategy = known[id(layer_plan)]
        if strategy is None:
            wrong.append(f"layer_plans.{name}.split")
        else:
            strategies[name] = strategy
    if len(plan.stages) != 1:
        wrong.append("stages")
    if wrong:
        rule = "cannot be priced yet"
        legal = "one stage, split over replica and shard alone"
        raise ConfigError(
            [Violation(path=f"plan.{path}", value=None, rule=rule, legal=legal) for path in wrong]
        )
    return Draft(
        strategies=strategies,
        microbatches=plan.microbatches,
        global_batch=plan.global_batch,
        bucket_bytes=plan.bucket_bytes,
        overlap=plan.overlap,
    )


def describe_draft(draft: Draft) -> str:
    """The draft in one line, for those that lose."""
    counts = Counter(draft.strategies.values())
    how = "; ".join(
        (f"{count} layers: " if len(counts) > 1 else "") + describe_strategy(strategy)
        for strategy, count in counts.most_common()
    )
    return f"{how}, {draft.microbatches} x {draft.microbatch} samples"


def describe_strategy(strategy: Strategy) -> str:
    """``2 replicas x 4 shards (params), recompute``."""
    parts = []
    if strategy.replica > 1 or strategy.shard == 1:
        parts.append(f"{strategy.replica} replica" + ("s" if strategy.replica > 1 else ""))
    if strategy.shard > 1:
        level = "batch" if strategy.level == "none" else strategy.level
        parts.append(f"{strategy.shard} shards ({level})")
    return " x ".join(parts) + (", recompute" if strategy.recompute else "")


def _strategy(layout: DataLayout, layer_plan: LayerPlan) -> Strategy:
    return Strategy(
        replica=layout.replica,
        shard=layout.shard,
        level=layer_plan.level,
        recompute=layer_plan.recompute,
    )
