"""Windows that repeat, with no idle time on the busiest rank: found by a solver."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import ClassVar

import msgspec

from ..ir import Action
from ..play import Costs, play
from .by_list import Listed
from .kind import Order, Ranks
from .one_f_one_b import OneFOneB
from .repetend import Block, Repetend, Work
from .window_solver import ended, shortest, whole
from .zero_bubble import ZBH1

GRID = 1000  # units of the busiest rank's time over one microbatch, where costs share no larger one
EFFORT = 0.5  # deterministic seconds of the solver for one problem; 1 was 5 to 10 s of one core
FEW = 2  # microbatches for each that a rank may hold: so many are also scheduled without windows
_TINY = 1e-9


class Searched(Order):
    """A period as short as memory lets it be, with warm-up and cool-down to suit.

    `cap` is how many microbatches a rank holds at most (None: as many as there are ranks, as does
    1F1B). Those that it may hold all at once are scheduled without windows.

    Differs: backward passes are in halves, but whole where nothing starts later by it. Windows
    repeat exactly, so where both ends count for more than the period an order without them can be
    shorter: up to `FEW` times the cap it is searched too, and that of the list scheduler, of ZB-H1
    or of 1F1B is taken where it keeps to the cap and is shorter than both.
    """

    name: ClassVar[str] = "searched"
    source: ClassVar[str] = "Lin et al. 2024, Tessel"
    line: ClassVar[str] = "A solver's windows that repeat, as short as the busiest rank lets them."
    bubble: ClassVar[str] = "at most that of zb-auto"
    peak: ClassVar[str] = "p"
    by_costs: ClassVar[bool] = True

    def __init__(self, cap: int | None = None) -> None:
        self.cap = cap

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """The same ones for the same costs, whatever their unit."""
        cap = self.cap or n_ranks
        found = list(found_alone(cap, n_microbatches, costs))
        for order in (_Capped(cap), ZBH1(), OneFOneB()):
            ranks = order.actions(n_ranks, n_microbatches, costs)
            played = play(ranks, n_ranks, costs)
            if all(played.peak(rank) <= cap for rank in range(n_ranks)):
                found.append(ranks)
        best = min(found, key=lambda ranks: play(ranks, n_ranks, costs).makespan_s)
        return whole_backward(best, n_ranks, costs)


class _Capped(Listed):
    """What the list scheduler finds under a cap of its own."""

    def __init__(self, most: int) -> None:
        self._most = most

    def cap(self, n_ranks: int) -> float:
        """As given."""
        return self._most


def found_alone(cap: int, n_microbatches: int, costs: Costs) -> tuple[Ranks, ...]:
    """What the solver finds, in windows and without; backward passes are in halves."""
    return tuple(
        tuple(
            tuple(Action(kind=kind, stage=stage, microbatch=each) for kind, stage, each in own)
            for own in blocks
        )
        for blocks in _blocks(in_units(costs), cap, n_microbatches)
    )


def in_units(costs: Costs) -> Work:
    """Costs in the largest unit that they share, if that is not too small; else rounded.

    >>> in_units(Costs.equal(2, forward=0.5, inputs=0.75, weights=0.25)).inputs
    (3, 3)
    """
    lanes = (costs.forward, costs.inputs, costs.weights)
    busy_s = max(map(sum, zip(*lanes, strict=True))) or 1.0
    all_s = [each for lane in lanes for each in lane] + [costs.send] * bool(costs.send)

    def shared(units: int) -> bool:
        counts = (each / busy_s * units for each in all_s)
        return all(round(n) >= 1 and abs(n - round(n)) < _TINY * GRID for n in counts)

    units = next((units for units in range(3, GRID) if shared(units)), GRID)
    forward, inputs, weights = (
        tuple(max(round(each / busy_s * units), 1) for each in lane) for lane in lanes
    )
    send = round(costs.send / busy_s * units)
    return Work(forward=forward, inputs=inputs, weights=weights, send=send)


@lru_cache(maxsize=256)
def _blocks(work: Work, cap: int, n_microbatches: int) -> tuple[list[list[Block]], ...]:
    """Of each rank in turn, in windows and without, as far as that is found."""
    found = []
    if n_microbatches > cap and (windows := _windows(work, cap)) is not None:
        found.append(windows.ranks(work.n_ranks, n_microbatches))
    if n_microbatches <= FEW * cap:
        blocks = whole(work, n_microbatches, cap, EFFORT)
        found += [] if blocks is None else [blocks]
    return tuple(found)


@lru_cache(maxsize=256)
def _windows(work: Work, cap: int) -> Repetend | None:
    """Of the least period, with ends that make use of all that may be held."""
    least = shortest(work, cap)
    return None if least is None else ended(work, cap, least.period, EFFORT)


def whole_backward(ranks: Ranks, n_stages: int, costs: Costs) -> Ranks:
    """I and W that follow each other as one B, where the stage before does not wait for I."""
    played = play(ranks, n_stages, costs)
    starts_s = {
        (span.action.stage, span.action.microbatch): span.start_s
        for spans in played.spans
        for span in spans
        if span.action.kind in "BI"
    }
    found = []
    for spans in played.spans:
        own = [span.action for span in spans]
        for first, second in pairwise(spans):
            inputs, weights = first.action, second.action
            if (inputs.kind, weights.kind) != ("I", "W") or inputs.microbatch != weights.microbatch:
                continue
            wanted_s = starts_s.get((inputs.stage - 1, inputs.microbatch), float("inf"))
            if second.end_s + costs.send <= wanted_s + _TINY * played.makespan_s:
                at = own.index(inputs)
                own[at : at + 2] = [msgspec.structs.replace(inputs, kind="B")]
        found.append(tuple(own))
    return tuple(found)
