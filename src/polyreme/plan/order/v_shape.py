"""Two chunks a rank in a V, as one block of passes that repeats: memory is chosen by its slope."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from ...errors import undefined
from ..ir import Action
from ..play import Costs, Key, names, needs, play
from .kind import Order, Ranks

_PERIOD = 6  # passes of a rank over one microbatch: F, I and W of two chunks
_TINY = 1e-12  # seconds that do not tell one time from another


class _VShape(Order):
    """A microbatch goes down the V and back, and the next one follows six passes later.

    `slopes` are the passes from a rank to the next: F down, F up, I down, I up. The sum of the
    four is in sixths what a rank holds of p microbatches.
    """

    source: ClassVar[str] = "Qi et al. 2024, controllable memory"
    chunks: ClassVar[int] = 2
    by_costs: ClassVar[bool] = True
    slopes: ClassVar[tuple[int, int, int, int]]

    def turns(self, n_ranks: int) -> tuple[int, int, int]:
        """Passes from F to F at the foot of the V, from F to I at its end, from I to I."""
        raise undefined(self, "turns")

    def cap(self, n_ranks: int) -> int:
        """What a rank holds at most, in chunks."""
        raise undefined(self, "cap")

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """Down the ranks and back up."""
        return min(stage, 2 * n_ranks - 1 - stage)

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """The block as it is, or with its weight halves where ranks wait: what is shorter."""
        as_it_is = _repeated(self._block(n_ranks), n_microbatches)
        cap = self.cap(n_ranks)
        found = [as_it_is, *(_late(as_it_is, cap, costs, fits=fits) for fits in (True, False))]
        return min(found, key=lambda ranks: play(ranks, 2 * n_ranks, costs).makespan_s)

    def _block(self, p: int) -> list[list[tuple[int, Action]]]:
        """When each rank plays its passes over microbatch 0, in passes."""
        down, up, back_down, back_up = self.slopes
        foot, end, back_foot = self.turns(p)
        forward = [*range(0, p * down, down)]
        forward += range(forward[-1] + foot, forward[-1] + foot + p * up, up)
        last = forward[-1] + end
        backward = [*range(last, last + p * back_down, back_down)]
        first = backward[-1] + back_foot
        backward += range(first, first + p * back_up, back_up)
        backward.reverse()
        found = []
        for rank in range(p):
            stages = (2 * p - 1 - rank, rank)
            own = [(forward[stage], Action(stage=stage, kind="F")) for stage in stages]
            own += [(backward[stage], Action(stage=stage, kind="I")) for stage in stages]
            taken = {time % _PERIOD for time, _ in own}
            assert len(taken) == 4, "passes of a block that meet"
            for stage in stages:
                time = backward[stage] + 1
                while time % _PERIOD in taken:
                    time += 1
                taken.add(time % _PERIOD)
                own.append((time, Action(stage=stage, kind="W")))
            found.append(own)
        return found


class VHalf(_VShape):
    """The V with half the memory of 1F1B."""

    name: ClassVar[str] = "v-half"
    line: ClassVar[str] = "Two chunks a rank in a V, with half the memory and bubble of 1F1B."
    bubble: ClassVar[str] = "half of 1F1B's if F = I = W"
    peak: ClassVar[str] = "(p+2)//2"
    slopes: ClassVar[tuple[int, int, int, int]] = (1, 2, 1, 2)

    def turns(self, n_ranks: int) -> tuple[int, int, int]:
        """Such that no two passes meet."""
        return (2, 1, 1) if n_ranks % 2 else (4, 1, 5)

    def cap(self, n_ranks: int) -> int:
        """Half, and what is on the way."""
        return (n_ranks + 2) // 2 * 2


class VMin(_VShape):
    """The V with a third of the memory of 1F1B."""

    name: ClassVar[str] = "v-min"
    line: ClassVar[str] = "Two chunks a rank in a V, with a third of the memory of 1F1B."
    bubble: ClassVar[str] = "two thirds of 1F1B's if F = I = W"
    peak: ClassVar[str] = "(p+4)//3"
    slopes: ClassVar[tuple[int, int, int, int]] = (1, 1, 1, 1)

    def turns(self, n_ranks: int) -> tuple[int, int, int]:
        """Such that no two passes meet."""
        return (1, 1, 1) if n_ranks % 3 else (3, 1, 3)

    def cap(self, n_ranks: int) -> int:
        """A third, and what is on the way."""
        return (n_ranks + 4) // 3 * 2


def _repeated(block: list[list[tuple[int, Action]]], n_microbatches: int) -> Ranks:
    """The block again and again, a period apart."""
    found = []
    for own in block:
        timed = [
            (time + _PERIOD * each, msgspec.structs.replace(action, microbatch=each))
            for time, action in own
            for each in range(n_microbatches)
        ]
        found.append(tuple(action for _, action in sorted(timed, key=lambda entry: entry[0])))
    return tuple(found)


def _late(ranks: Ranks, cap: int, costs: Costs, *, fits: bool) -> Ranks:
    """F and I as they stand; W only where a rank waits, or may hold no more.

    With `fits`, W goes into a gap only if it has ended when the next pass can start.
    """
    n_stages = 2 * len(ranks)
    passes = [[action for action in own if action.kind != "W"] for own in ranks]
    found: list[list[Action]] = [[] for _ in ranks]
    waiting: list[list[Action]] = [[] for _ in ranks]
    free_s, held, place = [0.0] * len(ranks), [0] * len(ranks), [0] * len(ranks)
    ended: dict[Key, float] = {}

    def coming(rank: int) -> tuple[float, Action] | None:
        """What the rank plays next and when, as far as is known."""
        wait = waiting[rank][0] if waiting[rank] else None
        at_once = None if wait is None else (free_s[rank], wait)
        if place[rank] == len(passes[rank]):
            return at_once
        action = passes[rank][place[rank]]
        needed = needs(action, n_stages)
        if any(each not in ended for each in needed):
            return at_once
        start_s = max([free_s[rank], *(ended[each] for each in needed)])
        gap_s = start_s - free_s[rank]
        full = action.kind == "F" and held[rank] == cap
        if wait is not None and (
            full or (gap_s > _TINY and (not fits or costs.of(wait) <= gap_s + _TINY))
        ):
            return at_once
        return start_s, action

    for _ in range(sum(map(len, ranks))):
        able = [(*each, rank) for rank in range(len(ranks)) if (each := coming(rank)) is not None]
        # A weight half gives way to a pass that starts at the same time: it may fill no gap yet.
        start_s, action, rank = min(able, key=lambda each: (each[0], each[1].kind == "W"))
        found[rank].append(action)
        free_s[rank] = start_s + costs.of(action)
        ended |= dict.fromkeys(names(action), free_s[rank])
        if action.kind == "W":
            waiting[rank].remove(action)
            held[rank] -= 1
        else:
            place[rank] += 1
            held[rank] += action.kind == "F"
            if action.kind == "I":
                waiting[rank].append(msgspec.structs.replace(action, kind="W"))
    return tuple(map(tuple, found))
