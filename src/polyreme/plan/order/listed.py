"""A list scheduler: what each rank plays next, found while the step is played, under a cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import msgspec

from ..ir import Action, ActionKind
from ..play import Costs, Key, names, needs
from .kind import Ranks

_TINY = 1e-12  # seconds that do not tell one time from another


class Taste(msgspec.Struct, frozen=True, kw_only=True):
    """What is preferred where several passes could be next.

    Attributes:
        ahead: Forward passes go on before the first backward one, up to the cap, though its
            input is there.
        inputs_first: Of passes that can start, an input half goes before a forward pass.
        fill: A weight half is played in any gap, though the next pass would start before it ends.
        prudent: Room is kept for what forward passes make due. Without it a step may be shorter,
            or come to where the cap lets nothing go on.
    """

    ahead: bool
    inputs_first: bool
    fill: bool
    prudent: bool


TASTES = tuple(
    Taste(ahead=ahead, inputs_first=first, fill=fill, prudent=prudent)
    for ahead, first, fill, prudent in product((False, True), repeat=4)
)


@dataclass(kw_only=True)
class Pipe:
    """What is to be scheduled: who holds which stage, which microbatches go that way, and a cap.

    `ways` holds the rank of each stage, once for each direction; microbatches are dealt to the
    directions in turn, and an action's `copy` is its direction. `cap` counts forward passes of one
    stage that a rank holds; W frees `weights_share` of one, I the rest. Without `halves` backward
    passes are whole.
    """

    ways: Sequence[Sequence[int]]
    n_ranks: int
    n_microbatches: int
    costs: Costs
    cap: float
    halves: bool = True
    weights_share: float = 1.0

    @property
    def n_stages(self) -> int:
        """Of each direction."""
        return len(self.ways[0])

    def microbatches(self, way: int) -> range:
        """Those of a direction."""
        return range(way, self.n_microbatches, len(self.ways))


_Lane = tuple[int, int]  # direction, stage


@dataclass
class _Rank:
    """How far one rank is: passes done by lane, weight halves that wait."""

    lanes: list[_Lane]
    free_s: float = 0.0
    held: float = 0.0
    forward: Counter[_Lane] = field(default_factory=Counter)
    back: Counter[_Lane] = field(default_factory=Counter)
    weights: list[Action] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)


def scheduled(pipe: Pipe, taste: Taste) -> Ranks | None:
    """Each rank's actions by one taste; None where the cap lets nothing go on."""
    ranks = [
        _Rank([(way, s) for way, row in enumerate(pipe.ways) for s, r in enumerate(row) if r == n])
        for n in range(pipe.n_ranks)
    ]
    ended: dict[Key, float] = {}
    left = (3 if pipe.halves else 2) * pipe.n_microbatches * pipe.n_stages
    while left:
        found = [
            (*best, number)
            for number, rank in enumerate(ranks)
            if (best := _next(rank, pipe, taste, ended)) is not None
        ]
        if not found:
            return None
        start_s, _, action, number = min(found, key=lambda each: each[:2])
        _take(ranks[number], action, start_s, pipe, ended)
        left -= 1
    return tuple(tuple(rank.actions) for rank in ranks)


def best(pipe: Pipe, makespan: Callable[[Ranks], float]) -> Ranks | None:
    """The shortest of all tastes."""
    found = [each for taste in TASTES if (each := scheduled(pipe, taste)) is not None]
    return min(found, key=makespan, default=None)


def _next(
    rank: _Rank, pipe: Pipe, taste: Taste, ended: dict[Key, float]
) -> tuple[float, int, Action] | None:
    """What the rank would play next: when, whether it gives way to others then, and what."""
    backs: list[tuple[float, Action]] = []
    forwards: list[tuple[float, Action]] = []
    for lane in rank.lanes:
        of_way = pipe.microbatches(lane[0])
        if rank.back[lane] < rank.forward[lane]:
            kind: ActionKind = "I" if pipe.halves else "B"
            backs += _when(kind, lane, of_way[rank.back[lane]], rank, pipe, ended)
        due = _promised(rank, lane, pipe) if taste.prudent else 1
        room = rank.held + due <= pipe.cap + _TINY
        if rank.forward[lane] < len(of_way) and room:
            forwards += _when("F", lane, of_way[rank.forward[lane]], rank, pipe, ended)
    wait = rank.weights[0] if rank.weights else None
    only_ahead = taste.ahead and forwards and not any(rank.back.values())
    able = forwards if only_ahead else backs + forwards
    if not able:
        return None if wait is None else (rank.free_s, 1, wait)
    soonest = min(each[0] for each in able)
    ready = [each for each in able if each[0] <= soonest + _TINY]
    wanted = "IB" if taste.inputs_first else "F"
    chosen = max([each for each in ready if each[1].kind in wanted] or ready, key=_depth)
    gap = chosen[0] - rank.free_s
    if wait is not None and gap > _TINY and (taste.fill or pipe.costs.of(wait) <= gap + _TINY):
        return rank.free_s, 1, wait
    return chosen[0], 0, chosen[1]


def _promised(rank: _Rank, lane: _Lane, pipe: Pipe) -> int:
    """Passes that a forward pass makes due: its own, and those of what comes back to this rank.

    So it is with one of each other direction that still comes and holds nothing here. Without room
    for them nothing would ever be freed.
    """
    way, stage = lane
    later = [each for each in rank.lanes if each[0] == way and each[1] > stage]
    others = [each for each in rank.lanes if each[0] != way]
    to_come = sum(
        rank.forward[each] == rank.back[each] < len(pipe.microbatches(each[0])) for each in others
    )
    return 1 + sum(rank.forward[lane] + 1 - rank.forward[each] for each in later) + to_come


def _depth(each: tuple[float, Action]) -> int:
    """Of several stages the one that is nearest to being freed."""
    action = each[1]
    return action.stage if action.kind == "F" else -action.stage


def _when(
    kind: ActionKind, lane: _Lane, microbatch: int, rank: _Rank, pipe: Pipe, ended: dict[Key, float]
) -> list[tuple[float, Action]]:
    """The pass and when it could start, if what it needs is known to end."""
    way, stage = lane
    action = Action(stage=stage, kind=kind, microbatch=microbatch, copy=way)
    start_s = rank.free_s
    for each in needs(action, pipe.n_stages):
        if each not in ended:
            return []
        away = pipe.ways[way][each[1]] != pipe.ways[way][stage]
        start_s = max(start_s, ended[each] + pipe.costs.send * away)
    return [(start_s, action)]


def _take(rank: _Rank, action: Action, start_s: float, pipe: Pipe, ended: dict[Key, float]) -> None:
    rank.free_s = start_s + pipe.costs.of(action)
    rank.actions.append(action)
    ended |= dict.fromkeys(names(action), rank.free_s)
    lane = (action.copy, action.stage)
    if action.kind == "F":
        rank.forward[lane] += 1
        rank.held += 1
    elif action.kind == "W":
        rank.held -= pipe.weights_share
        rank.weights.remove(action)
    else:
        rank.back[lane] += 1
        rank.held -= 1 - pipe.weights_share if action.kind == "I" else 1
        if action.kind == "I":
            rank.weights.append(msgspec.structs.replace(action, kind="W"))
