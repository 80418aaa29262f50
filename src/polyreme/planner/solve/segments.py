"""Chains whose tensors come and go alike whatever the strategies: stages are solved one by one.

Where no strategy changes what another layer pays, the least time of a stage depends on its layers
alone: a multiple-choice knapsack of their times under the memory of the stage, by fronts of (time,
bytes) that grow layer by layer. Stages are then chosen by dynamic programming under a falling bound
on the longest, which is the outer enumeration of Alpa (Zheng et al., OSDI 2022, section 5.2) with
every value of it.

Source of the fronts: Nemhauser and Ullmann 1969.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..stages import cheapest, spans
from .grid import grid
from .instance import Array, Assignment, Instance

_NEAR = 1e-9
_EVEN = 1e-12  # relative; closer ones are one: sums of the same terms in another order
MOST = 20_000  # of a front

Index = npt.NDArray[np.int64]


class TooWide(Exception):
    """A front has more than `MOST` ways, or time ran out."""


@dataclass(frozen=True)
class _Front:
    """Ways through some layers that no other is better than, fastest first.

    `before` is the row of the front of one layer less, `option` the strategy of that layer.
    """

    time: Array
    held: Array
    before: Index
    option: Index


_NOTHING = _Front(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64))


def is_apart(families: Index) -> bool:
    """Whether no strategy of a layer changes what others pay."""
    return bool((families == families[:, :1]).all())


def segments(instance: Instance, below: float, end_s: float = np.inf) -> Assignment:
    """The assignment that takes least, if it takes less than `below`; always with a proof.

    Raises:
        TooWide: a stage has too many ways; labels with bounds do better. Or it is past `end_s`.
    """
    solver = _Segments(instance, end_s)
    return solver.best(below)


class _Segments:
    def __init__(self, instance: Instance, end_s: float) -> None:
        self._instance, self._end_s = instance, end_s
        self._fronts: dict[tuple[int, bytes], _Front] = {}
        self._kinds = [self._alike(stage) for stage in range(instance.n_stages)]
        self._crossing: Array = instance.between[:, 0, 0]
        self._inside: Array = instance.inside[:, 0, 0]

    def best(self, below: float) -> Assignment:
        """See `segments`."""
        n_stages, n = self._instance.n_stages, self._instance.n_layers
        least = spans(self._instance.time.min(axis=2), self._inside)
        alpha, beta = self._instance.alpha, self._instance.beta
        relaxed = cheapest(least, self._crossing, np.inf)
        if relaxed is None:
            return Assignment(bound_s=below, proved=True)
        # With what all others take at least, no stage of a better step takes more than this.
        by_hand = grid(self._instance).objective_s
        most = np.inf
        if beta > 0:
            most = (min(below, by_hand) * (1 + _NEAR) - alpha * relaxed[0]) / beta
        each = self._instance.time.min(axis=(0, 2))
        # Of all layers before one, wherever stages are cut: without what goes from layer to layer.
        before = np.concatenate([[0.0], np.cumsum(each)])
        times = np.full((n_stages, n, n + 1), np.inf)
        for stage, start in itertools.product(range(n_stages), range(n)):
            if start < stage or (stage == 0 and start > 0) or before[start] > stage * most:
                continue
            if before[n] - before[start] > (n_stages - stage) * most:
                continue
            self._fill(times[stage, start], stage, start, least[stage, start], most)
        found, value = self._outer(times, below)
        if found is None:
            return Assignment(bound_s=below, proved=True)
        stages: list[int] = []
        strategies: list[int] = []
        for stage, (start, end) in enumerate(itertools.pairwise(found)):
            stages += [stage] * (end - start)
            strategies += self._strategies(stage, start, end)
        return Assignment(
            stages=tuple(stages),
            strategies=tuple(strategies),
            objective_s=value,
            bound_s=value,
            proved=True,
        )

    def _outer(self, times: Array, below: float) -> tuple[tuple[int, ...] | None, float]:
        """Where stages begin and the last ends, under a lower and lower bound on the longest."""
        alpha, beta = self._instance.alpha, self._instance.beta
        best, found, limit = below, None, np.inf
        while True:
            cut = cheapest(times, self._crossing, limit)
            if cut is None:
                return found, best
            total, ends, longest = cut
            value = alpha * total + beta * longest
            if value < best:
                best, found = value, ends
            # Any other has a shorter longest stage, and takes no less in all.
            if beta == 0 or alpha * total >= best:
                return found, best
            limit = min(longest, (best - alpha * total) / beta)
            limit = np.nextafter(limit, -np.inf)

    def _fill(self, row: Array, stage: int, start: int, least: Array, most: float) -> None:
        """The least time of a stage from `start` on, by where it ends; infinite past `most`."""
        n = self._instance.n_layers
        last = stage == self._instance.n_stages - 1
        moved = 0.0
        for end, front in self._grown(stage, start):
            if least[end] > most or not len(front.time):
                return
            moved += self._inside[end - 2] if end - start > 1 else 0.0
            if not last or end == n:
                row[end] = front.time[0] + moved

    def _grown(self, stage: int, start: int) -> Iterator[tuple[int, _Front]]:
        """(end, front) of a stage that begins there, one layer more each time."""
        front = _NOTHING
        kinds = self._kinds[stage]
        held = np.zeros(kinds.max() + 1, dtype=np.int64)
        for layer in range(start, self._instance.n_layers):
            held[kinds[layer]] += 1
            key = stage, held.tobytes()
            if key not in self._fronts:
                self._fronts[key] = self._longer(front, stage, layer)
            front = self._fronts[key]
            yield layer + 1, front

    def _longer(self, front: _Front, stage: int, layer: int) -> _Front:
        instance = self._instance
        if time.monotonic() > self._end_s:
            raise TooWide
        offered = np.flatnonzero(np.isfinite(instance.time[stage, layer]))
        took = (front.time[:, None] + instance.time[stage, layer, offered]).reshape(-1)
        held = (front.held[:, None] + instance.memory[stage, layer, offered]).reshape(-1)
        fits = np.flatnonzero(held <= instance.capacity[stage])
        took, held = took[fits], held[fits]
        if not len(fits):
            return _Front(took, held, fits, fits)
        # Equal but for rounding is equal: then the one of fewer bytes comes first.
        rounded = np.round(took / (_EVEN * (took.max() or 1.0)))
        order = np.lexsort((held, rounded))
        room = held[order] + _EVEN * instance.capacity[stage]
        lowest = np.minimum.accumulate(held[order])
        kept = order[np.concatenate([[True], room[1:] < lowest[:-1]])]
        if len(kept) > MOST:
            raise TooWide
        row, option = np.divmod(fits[kept], len(offered))
        return _Front(took[kept], held[kept], row, offered[option])

    def _strategies(self, stage: int, start: int, end: int) -> list[int]:
        """Those of the fastest way of a stage, layer by layer."""
        front, fronts = _NOTHING, []
        for layer in range(start, end):
            front = self._longer(front, stage, layer)
            fronts.append(front)
        at, found = 0, []
        for each in reversed(fronts):
            found.append(int(each.option[at]))
            at = int(each.before[at])
        return found[::-1]

    def _alike(self, stage: int) -> Index:
        """A number for each layer, the same for those alike on this stage."""
        both = np.hstack([self._instance.time[stage], self._instance.memory[stage]])
        found: Index = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
        return found
