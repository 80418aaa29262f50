"""Every way to cut devices and batch, the most promising first, each solved to its optimum."""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

import msgspec
import numpy as np

from ..plan.order import ORDERS
from .branch import Moments, Node, branch, lone_s
from .draft import Draft
from .outline import Outline, outlines
from .prices import Pricing
from .solve.exact import TOLERANCE
from .solve.instance import Array, Assignment, Instance
from .space import Space

N_BEST = 20
_TIGHTENINGS = 8
_BRANCHES = 24  # of an outline
_SOLVES = 4  # one may take this part of what time is left


class Solve(Protocol):
    """A solver of `solve`."""

    def __call__(self, instance: Instance, *, below: float, deadline_s: float) -> Assignment:
        """The best that is found in so many seconds, if it takes less than `below`."""


@dataclass(frozen=True, kw_only=True)
class Swept:
    """Drafts of different outlines by rising objective, with it.

    No draft that fits has an objective below `bound_s`. `whole` says that time did not run out
    before as many were found as asked, or all.
    """

    found: tuple[tuple[float, Draft], ...]
    bound_s: float
    whole: bool

    def __add__(self, other: Swept) -> Swept:
        """What both found."""
        return Swept(
            found=tuple(sorted((*self.found, *other.found), key=lambda pair: pair[0])),
            bound_s=min(self.bound_s, other.bound_s),
            whole=self.whole and other.whole,
        )


@dataclass(kw_only=True)
class _Offered:
    """An outline; its numbers are made when they are needed. `found` says that it has a draft."""

    outline: Outline
    costs: Pricing
    found: bool = False
    branched: int = 0

    @functools.cached_property
    def moments(self) -> Moments:
        """What layers take for a moment."""
        reducing, passing, fetched = self.costs.moments(self.outline)
        return Moments(reducing=reducing, passing=passing, fetched=fetched)

    @functools.cached_property
    def node(self) -> Node:
        """The numbers, with stages where the user fixed them."""
        instance = _placed(self.costs.instance(self.outline), self.outline.space)
        return Node.of(instance, self.moments, self.shared)

    @property
    def shared(self) -> int:
        """Stages of a pipeline rank."""
        order = ORDERS.get(self.outline.space.order)
        return order.chunks * order.copies if order else 1


@dataclass(kw_only=True)
class _Open:
    """A part of an outline under way; `relaxed_s` is the optimum where sums over layers must fit.

    `draft` is it, or one of less memory, `solved` as the solver gave it.
    """

    offered: _Offered
    node: Node | None = None
    relaxed_s: float | None = None
    solved: Assignment = field(default_factory=Assignment)
    draft: Draft | None = None
    left: int = _TIGHTENINGS

    def branches(self, over: Sequence[int]) -> tuple[Node, ...]:
        """Two parts of it, by the stage that lacks most, with all that fits; none: not known."""
        assert self.node is not None, "it was solved"
        offered = self.offered
        if offered.shared > 1 or offered.branched >= _BRANCHES:
            return ()
        offered.branched += 1
        return branch(self.node, offered.moments, self.solved, int(np.argmax(over)))


class Sweep:
    """All outlines of some spaces, each with what no assignment of it goes below."""

    def __init__(self, priced: Iterable[tuple[Space, Pricing]]) -> None:
        self._offered = [
            (costs.least_s(outline), _Offered(outline=outline, costs=costs))
            for space, costs in priced
            for outline in outlines(space)
        ]

    def __call__(
        self,
        solve: Solve,
        *,
        end_s: float,
        n_best: int = N_BEST,
        below: float = np.inf,
        tell: Callable[[str], None] | None = None,
    ) -> Swept:
        """The drafts of the lowest objectives that fit, one of each outline.

        Objectives of `below` and more are not looked for. After `end_s` nothing more is, if a draft
        is found or one of `below` is known. `tell` hears again and again how far the search is.

        An outline is solved when no other has a lower bound. Where the optimum of its sums over
        layers does not fit after all, it is cut in two (`branch`), and where that says nothing, it
        is solved again with that much less memory.
        """
        number = count()
        heap = [(bound, next(number), _Open(offered=each)) for bound, each in self._offered]
        heapq.heapify(heap)
        found: list[tuple[float, Draft]] = []
        floor = np.inf  # of outlines whose optimum is not known
        while heap and len(found) < n_best:
            known = bool(found) or np.isfinite(below)
            if heap[0][0] >= below or (known and time.monotonic() >= end_s):
                break
            value, _, item = heapq.heappop(heap)
            if tell is not None:
                tell(f"{len(found)} of at most {n_best} plans found, {1 + len(heap)} ways open")
            if item.offered.found:
                continue
            if item.node is None:
                item.node = item.offered.node
                bound = _least_s(item.node.instance)
                if np.isfinite(bound):
                    heapq.heappush(heap, (max(bound, value), next(number), item))
                continue
            if item.draft is not None:
                over = item.offered.costs.fitting.shortfalls(item.draft)
                if max(over) <= 0:
                    found.append((value, item.draft))
                    item.offered.found = True
                    continue
                nodes = item.branches(over) if item.left == _TIGHTENINGS else ()
                for node in nodes:
                    part = _Open(offered=item.offered, node=node)
                    heapq.heappush(heap, (value, next(number), part))
                if nodes:
                    floor = min(floor, max(value, lone_s(item.node.instance)))
                    continue
                floor = min(floor, item.relaxed_s or value)
                if not item.left:
                    continue
                item.node = _tightened(item.node, item.solved, item.draft, over)
                item.left -= 1
            left_s = max(1.0, (end_s - time.monotonic()) / _SOLVES)
            solved = _solved(item.node.instance, item.offered, solve, below, left_s)
            if not solved.proved:
                floor = min(floor, solved.bound_s)
            if solved.stages:
                item.relaxed_s = item.relaxed_s or solved.objective_s
                item.draft, item.solved = _draft(item.offered.outline, solved), solved
                heapq.heappush(heap, (solved.objective_s, next(number), item))
        least = [value for value, _ in found] + [value for value, _, _ in heap]
        whole = not heap or len(found) >= n_best or heap[0][0] >= below
        return Swept(found=tuple(found), bound_s=min([floor, *least]), whole=whole)


def _solved(
    instance: Instance, offered: _Offered, solve: Solve, below: float, deadline_s: float
) -> Assignment:
    """The best where layers that share parameters run alike, whichever way it is."""
    outline = offered.outline
    ways = [msgspec.structs.replace(each, recompute=False) for each in outline.strategies]
    units = [
        [outline.space.layers.index(name) for name in unit]
        for unit in offered.costs.tied
        if len(set(ways)) > 1
    ]
    best = Assignment(bound_s=np.inf, proved=True)
    for chosen in itertools.product(dict.fromkeys(ways), repeat=len(units)):
        each = instance
        if units:
            time_s = instance.time.copy()
            for unit, way in zip(units, chosen, strict=True):
                others = [k for k, other in enumerate(ways) if other != way]
                time_s[np.ix_(range(len(time_s)), unit, others)] = np.inf
            each = replace(instance, time=time_s)
        limit = min(below, best.objective_s)
        found = _plainer(each, solve(each, below=limit, deadline_s=deadline_s))
        found = _arranged(each, outline, found)
        better = found if found.objective_s < best.objective_s else best
        bound_s, proved = min(best.bound_s, found.bound_s), best.proved and found.proved
        best = replace(better, bound_s=bound_s, proved=proved)
    return best


def _plainer(instance: Instance, solved: Assignment) -> Assignment:
    """As good, with fewer kinds of strategies, where some made no difference."""
    usual = Counter(solved.strategies).most_common()
    for rare, _ in reversed(usual):
        for often, _ in usual:
            if often == rare:
                break
            strategies = tuple(often if k == rare else k for k in solved.strategies)
            value = instance.objective_s(solved.stages, strategies)
            if value <= solved.objective_s * (1 + TOLERANCE):
                solved = replace(solved, strategies=strategies)
                break
    return solved


def _arranged(instance: Instance, outline: Outline, solved: Assignment) -> Assignment:
    """Of layers of a stage that are alike, those that are recomputed first, as costs the same.

    What a layer makes anew then takes the place of what layers after it have freed.
    """
    strategies = list(solved.strategies)
    alike: dict[tuple[int, bytes, bytes], list[int]] = {}
    for layer, stage in enumerate(solved.stages):
        rows = instance.time[stage, layer].tobytes(), instance.memory[stage, layer].tobytes()
        alike.setdefault((stage, *rows), []).append(layer)
    for layers in alike.values():
        chosen = sorted(
            (strategies[layer] for layer in layers),
            key=lambda k: not outline.strategies[k].recompute,
        )
        for layer, strategy in zip(layers, chosen, strict=True):
            strategies[layer] = strategy
    value = instance.objective_s(solved.stages, strategies)
    if not value <= solved.objective_s * (1 + TOLERANCE):
        return solved
    return replace(solved, strategies=tuple(strategies))


def _draft(outline: Outline, solved: Assignment) -> Draft:
    space = outline.space
    strategies = {
        name: outline.strategies[k] for name, k in zip(space.layers, solved.strategies, strict=True)
    }
    stages = tuple(
        tuple(name for name, at in zip(space.layers, solved.stages, strict=True) if at == stage)
        for stage in range(len(space.sizes))
    )
    return space.draft(strategies, outline.microbatches, stages)


def _placed(instance: Instance, space: Space) -> Instance:
    """With the stages that the user fixed, if any."""
    if space.parallel.stages is None or len(space.sizes) < 2:
        return instance
    stage_of = np.repeat(np.arange(len(space.sizes)), space.sizes)
    elsewhere = stage_of[None, :] != np.arange(len(space.sizes))[:, None]
    return replace(instance, time=np.where(elsewhere[:, :, None], np.inf, instance.time))


def _least_s(instance: Instance) -> float:
    """What no assignment goes below, memory aside but for the sum of all; cheap."""
    if (
        instance.is_hopeless
        or instance.memory.min(axis=2).min(axis=0).sum() > instance.capacity.sum()
    ):
        return float("inf")
    each = instance.time.min(axis=2).min(axis=0)
    longest = max(float(each.max()), float(each.sum()) / instance.n_stages)
    crossing = instance.between.min(axis=(1, 2)) if instance.n_stages > 1 else np.zeros(0)
    sent = np.sort(crossing)[: instance.n_stages - 1].sum()
    return float(instance.alpha * (each.sum() + sent) + instance.beta * longest)


def _tightened(node: Node, solved: Assignment, draft: Draft, over: tuple[int, ...]) -> Node:
    """With less memory on the stages of ranks that lack some, than what these hold now."""
    held = node.instance.stage_times(solved.stages, solved.strategies)[2]
    capacity: Array = node.instance.capacity.copy()
    for stage, ranks in enumerate(draft.holders):
        lacking = max(over[rank] for rank in ranks)
        if lacking > 0:
            sharing = sum(ranks[0] in each for each in draft.holders)
            capacity[stage] = min(capacity[stage], held[stage]) - lacking / sharing - 1
    instance = replace(node.instance, capacity=np.maximum(capacity, 1.0))
    return replace(node, instance=instance)
