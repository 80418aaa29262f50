"""FlexFlow's walk: random changes, kept where they help and sometimes where they do not."""

from __future__ import annotations

import bisect
import math
import random
import time
import zlib
from dataclasses import dataclass, replace

import numpy as np

from ..stages import cut, spans
from .grid import grid
from .instance import Assignment, Instance

PROPOSALS = 50  # for each layer and strategy
Move = tuple[int, int, int]  # a layer, the stage and the strategy that it gets


def mcmc(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """FlexFlow's Metropolis walk over strategies of layers and borders of stages.

    A random layer gets a random strategy, or a random border moves by a layer. What takes `more`
    seconds than now is accepted with probability exp(-beta more), what does not fit never. The best
    that was seen is given, after 50 proposals for each layer and strategy, half as many in a
    row that found nothing better, or the deadline. Random numbers depend on the instance alone.

    Source: Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks" (FlexFlow),
    MLSys 2019, section 6.

    Differs: the paper's beta is a number of its authors; here it is such that 1 % more than the
    start is accepted with probability 1/e. The walk starts from `grid`'s, or where that finds none
    from what holds the fewest bytes.
    """
    end_s = time.monotonic() + deadline_s
    if instance.is_hopeless:
        return Assignment()
    best = _start(instance, deadline_s)
    if not best.stages:
        return Assignment()
    walk, draw = _Walk(instance), random.Random(_seed(instance))
    now = walk.at(best)
    beta = 100 / max(best.objective_s, 1e-300)
    left = most = PROPOSALS * instance.n_layers * instance.n_strategies
    since = 0
    while left and since < most // 2 and time.monotonic() < end_s:
        left, since = left - 1, since + 1
        move = walk.proposal(now, draw)
        if move is None:
            continue
        after = walk.moved(now, move)
        if draw.random() < math.exp(min(0.0, beta * (now.objective_s - after.objective_s))):
            now = after
        if now.objective_s < best.objective_s:
            value = instance.objective_s(now.stages, now.strategies)  # sums drift as they change
            if value < best.objective_s:
                stages, strategies = tuple(now.stages), tuple(now.strategies)
                best = Assignment(stages=stages, strategies=strategies, objective_s=value)
                now, since = walk.at(best), 0
    return best if best.objective_s < below else Assignment()


def _start(instance: Instance, deadline_s: float) -> Assignment:
    """What people do by hand, or else what holds the fewest bytes."""
    found = grid(instance, deadline_s=deadline_s)
    if found.stages:
        return found
    held = instance.bytes_offered
    ends = cut(spans(held.min(axis=2) / instance.capacity[:, None]))
    if ends is None:
        return found
    stages = np.repeat(np.arange(instance.n_stages), np.diff(ends))
    leanest = held.argmin(axis=2)[stages, np.arange(instance.n_layers)]
    return instance.assignment(ends, leanest, np.inf)


def _seed(instance: Instance) -> int:
    """The same for the same times and bytes."""
    numbers = np.concatenate([instance.time.ravel(), instance.memory.ravel(), instance.capacity])
    return zlib.crc32(numbers.tobytes())


@dataclass(frozen=True, kw_only=True)
class _State:
    """Where the walk is, with what its stages and borders take and hold."""

    stages: list[int]
    strategies: list[int]
    took: list[float]
    crossing: list[float]
    held: list[float]
    objective_s: float


class _Walk:
    """Changes of one layer, priced by what they change: lists, because numbers come one by one."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._time, self._memory = instance.time.tolist(), instance.memory.tolist()
        self._inside, self._between = instance.inside.tolist(), instance.between.tolist()
        self._capacity = instance.capacity.tolist()
        self._offered = [
            [
                k
                for k in range(instance.n_strategies)
                if np.isfinite(instance.time[:, layer, k]).any()
            ]
            for layer in range(instance.n_layers)
        ]

    def at(self, assignment: Assignment) -> _State:
        """The state of an assignment."""
        stages, strategies = list(assignment.stages), list(assignment.strategies)
        took, crossing, held = self._instance.stage_times(stages, strategies)
        return _State(
            stages=stages,
            strategies=strategies,
            took=took.tolist(),
            crossing=crossing.tolist(),
            held=held.tolist(),
            objective_s=assignment.objective_s,
        )

    def proposal(self, now: _State, draw: random.Random) -> Move | None:
        """A random layer's random strategy, or a random border moved; none empties a stage."""
        n_layers = self._instance.n_layers
        at = draw.randrange(n_layers + self._instance.n_stages - 1)
        if at < n_layers:
            return at, now.stages[at], draw.choice(self._offered[at])
        stage = at - n_layers
        first = bisect.bisect_left(now.stages, stage + 1)  # behind the border
        layer, beside, to = (first, first + 1, stage)
        if draw.random() < 0.5:
            layer, beside, to = (first - 1, first - 2, stage + 1)
        if not 0 <= beside < n_layers or now.stages[beside] != now.stages[layer]:
            return None
        return layer, to, now.strategies[layer]

    def moved(self, now: _State, move: Move) -> _State:
        """The state after a move; its time is infinite where it does not fit."""
        layer, stage, strategy = move
        after = _State(
            stages=now.stages.copy(),
            strategies=now.strategies.copy(),
            took=now.took.copy(),
            crossing=now.crossing.copy(),
            held=now.held.copy(),
            objective_s=math.inf,
        )
        self._count(after, layer, -1)
        after.stages[layer], after.strategies[layer] = stage, strategy
        self._count(after, layer, 1)
        if any(held > most for held, most in zip(after.held, self._capacity, strict=True)):
            return after
        total = sum(after.took) + sum(after.crossing)
        longest = max(*after.took, *after.crossing, 0.0)
        value = self._instance.alpha * total + self._instance.beta * longest
        return replace(after, objective_s=value if math.isfinite(value) else math.inf)

    def _count(self, state: _State, layer: int, sign: int) -> None:
        """Add to a state's sums what depends on a layer, or take it away."""
        stages, strategies = state.stages, state.strategies
        stage, strategy = stages[layer], strategies[layer]
        state.took[stage] += sign * self._time[stage][layer][strategy]
        state.held[stage] += sign * self._memory[stage][layer][strategy]
        for one in (layer - 1, layer):
            if 0 <= one < len(stages) - 1:
                inside = stages[one] == stages[one + 1]
                pairs = (self._inside if inside else self._between)[one]
                sums = state.took if inside else state.crossing
                sums[stages[one]] += sign * pairs[strategies[one]][strategies[one + 1]]
        for side in self._instance.sides:
            if layer == side.source or layer in side.reads:
                own = strategies[side.source]
                for target, cost in side.reads.items():
                    state.took[stages[target]] += sign * float(cost[own, strategies[target]])
                for border in range(stages[side.source], stages[side.last]):
                    state.crossing[border] += sign * float(side.border[own])
