"""What solvers of assignments are given: one way to cut devices and batch, in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Side:
    """A tensor of layer `source` that passes layers by, such as an encoder's output.

    `reads[target]` (K, K) are seconds a microbatch to bring it from the source's strategy to that
    of a layer that reads it; `border` (K) to carry it over each border of stages before the last
    of these.
    """

    source: int
    reads: Mapping[int, Array]
    border: Array

    @property
    def last(self) -> int:
        """The last layer that reads it."""
        return max(self.reads)


@dataclass(frozen=True, kw_only=True)
class Instance:
    """L layers, each with one of K strategies, on S stages that follow each other.

    `time` (S, L, K) are seconds a microbatch of a layer on a stage, infinite where the strategy
    is not offered; `memory` (S, L, K) its bytes there, of `capacity` (S), above 0. From a layer to
    the next one its output takes `inside` (L - 1, K, K) seconds on one stage, and `between` over
    the border of two. A step takes ``alpha (sum p_i + sum o_j) + beta max(p_i, o_j)``, where p_i
    is all time of stage i, and o_j that of border j; for 1F1B with c microbatches alpha is 1, beta
    c - 1.

    Source: Lin et al., "UniAP", CVPR 2025, equations 1 to 5; with the borders in the maximum.
    """

    time: Array
    memory: Array
    capacity: Array
    inside: Array
    between: Array
    sides: tuple[Side, ...] = ()
    alpha: float = 1.0
    beta: float = 0.0

    @property
    def is_hopeless(self) -> bool:
        """Whether there are more stages than layers, or a layer with no strategy at all."""
        offered = np.isfinite(self.time).any(axis=(0, 2)).all()
        return self.n_stages > self.n_layers or not offered

    @property
    def bytes_offered(self) -> Array:
        """Bytes (S, L, K), infinite where the strategy is not offered."""
        found: Array = np.where(np.isfinite(self.time), self.memory, np.inf)
        return found

    @property
    def n_stages(self) -> int:
        """S."""
        return int(self.time.shape[0])

    @property
    def n_layers(self) -> int:
        """L."""
        return int(self.time.shape[1])

    @property
    def n_strategies(self) -> int:
        """K."""
        return int(self.time.shape[2])

    def stage_times(
        self, stages: Sequence[int], strategies: Sequence[int]
    ) -> tuple[Array, Array, Array]:
        """p_i, o_j and the bytes of each stage, of an assignment by layer."""
        n = self.n_stages
        took, crossing, held = np.zeros(n), np.zeros(n - 1), np.zeros(n)
        for layer, (stage, strategy) in enumerate(zip(stages, strategies, strict=True)):
            took[stage] += self.time[stage, layer, strategy]
            held[stage] += self.memory[stage, layer, strategy]
            if layer + 1 < self.n_layers:
                pair = strategy, strategies[layer + 1]
                if stages[layer + 1] == stage:
                    took[stage] += self.inside[layer][pair]
                else:
                    crossing[stage] += self.between[layer][pair]
        for side in self.sides:
            strategy = strategies[side.source]
            for target, cost in side.reads.items():
                took[stages[target]] += cost[strategy, strategies[target]]
            crossing[stages[side.source] : stages[side.last]] += side.border[strategy]
        return took, crossing, held

    def objective_s(self, stages: Sequence[int], strategies: Sequence[int]) -> float:
        """Seconds of a step; infinite where a stage does not hold its layers."""
        took, crossing, held = self.stage_times(stages, strategies)
        if (held > self.capacity).any() or not np.isfinite(took).all():
            return float("inf")
        return self.total_s(took, crossing)

    def assignment(
        self, ends: Sequence[int], strategies: Sequence[int] | Integers, below: float
    ) -> Assignment:
        """Stages with these ends (`planner.stages`), of such strategies by layer; unproved.

        Nothing is assigned where it does not fit, or takes no less than `below`.
        """
        stages = tuple(np.repeat(np.arange(self.n_stages), np.diff(ends)).tolist())
        each = tuple(int(strategy) for strategy in strategies)
        value = self.objective_s(stages, each)
        if value >= below or not np.isfinite(value):
            return Assignment()
        return Assignment(stages=stages, strategies=each, objective_s=value)

    def total_s(self, took: Array, crossing: Array) -> float:
        """Seconds of a step of such stages and borders."""
        longest = max(took.max(), crossing.max(initial=0.0))
        return float(self.alpha * (took.sum() + crossing.sum()) + self.beta * longest)

    def with_side_fixed(self, side: Side, strategy: int) -> Instance:
        """The same, with that strategy for the source of a side tensor, and without the tensor."""
        time, between = self.time.copy(), self.between.copy()
        others = np.arange(self.n_strategies) != strategy
        time[:, side.source, others] = np.inf
        for target, cost in side.reads.items():
            time[:, target] += cost[strategy]
        between[side.source : side.last] += side.border[strategy]
        left = tuple(each for each in self.sides if each is not side)
        return replace(self, time=time, between=between, sides=left)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The best that was found: stage and strategy by layer (none: nothing was).

    No assignment takes less than `bound_s`. `proved` says that none takes less than this one, or,
    where there is none, that there is none below what was asked for.
    """

    stages: tuple[int, ...] = ()
    strategies: tuple[int, ...] = ()
    objective_s: float = float("inf")
    bound_s: float = 0.0
    proved: bool = False
