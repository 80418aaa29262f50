"""A list scheduler: what each rank plays next, found while the step is played, under a cap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import msgspec

from ..ir import Action
from ..play import Costs, Key, key, names, needs
from .kind import Ranks


class Taste(msgspec.Struct, frozen=True, kw_only=True):
    """What is preferred where several passes could be next.

    Attributes:
        ahead: Forward passes go on before the first backward one, up to the cap, though its
            input is there.
        inputs_first: Of passes that can start, an input half goes before a forward pass.
        fill: A weight half is played in any gap, though the next pass would start before it ends.
    """

    ahead: bool
    inputs_first: bool
    fill: bool


TASTES = tuple(
    Taste(ahead=ahead, inputs_first=first, fill=fill)
    for ahead, first, fill in product((False, True), repeat=3)
)


@dataclass(kw_only=True)
class Pipe:
    """What is to be scheduled: stages by rank, microbatches, and how many passes a rank holds.

    `cap` counts forward passes of one stage that are alive; W frees `weights_share` of one, I the
    rest.
    """

    rank_of: Sequence[int]
    n_ranks: int
    n_microbatches: int
    costs: Costs
    cap: float
    weights_share: float = 1.0


@dataclass
class _Rank:
    """How far one rank is."""

    stages: list[int]
    free_s: float = 0.0
    held: float = 0.0
    forward: dict[int, int] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)
    weights: list[Action] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)


def scheduled(pipe: Pipe, taste: Taste) -> Ranks | None:
    """Each rank's actions by one taste; None where the cap lets nothing go on."""
    ranks = [
        _Rank([s for s, r in enumerate(pipe.rank_of) if r == rank]) for rank in range(pipe.n_ranks)
    ]
    ended: dict[Key, float] = {}
    left = 3 * pipe.n_microbatches * len(pipe.rank_of)
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
    """What the rank would play next: when, a rank among others at that time, and what."""
    inputs, forwards = [], []
    for stage in rank.stages:
        m = rank.back.get(stage, 0)
        if m < rank.forward.get(stage, 0):
            inputs += _when(Action(stage=stage, kind="I", microbatch=m), rank, pipe, ended)
        m = rank.forward.get(stage, 0)
        if m < pipe.n_microbatches and rank.held + _promised(rank, stage) <= pipe.cap + 1e-9:
            forwards += _when(Action(stage=stage, kind="F", microbatch=m), rank, pipe, ended)
    first = any(rank.back.values())
    order = inputs + forwards
    if taste.ahead and not first and forwards:
        order = forwards
    if order:
        soonest = min(each[0] for each in order)
        ready = [each for each in order if each[0] <= soonest + 1e-12]
        halves = [each for each in ready if each[1].kind == "I"]
        if taste.inputs_first or len(halves) == len(ready):
            chosen = max(halves or ready, key=_depth)
        else:
            chosen = max((each for each in ready if each[1].kind == "F"), key=_depth)
        gap = chosen[0] - rank.free_s
        if rank.weights and gap > 1e-12:
            took = pipe.costs.of(rank.weights[0])
            if taste.fill or took <= gap + 1e-12:
                return rank.free_s, 1, rank.weights[0]
        return chosen[0], 0, chosen[1]
    if rank.weights:
        return rank.free_s, 1, rank.weights[0]
    return None


def _promised(rank: _Rank, stage: int) -> int:
    """Passes that a forward pass of a stage makes due: its own, and those of microbatches that
    come back to this rank: without room for them nothing would ever be freed.
    """  # noqa: D205
    later = rank.stages[rank.stages.index(stage) :]
    due = {each: rank.forward.get(each, 0) for each in later}
    due[stage] += 1
    return 1 + sum(due[stage] - due[each] for each in later[1:])


def _depth(each: tuple[float, Action]) -> int:
    """Of several stages the deepest: what is nearest to being freed."""
    action = each[1]
    return action.stage if action.kind == "F" else -action.stage


def _when(
    action: Action, rank: _Rank, pipe: Pipe, ended: dict[Key, float]
) -> list[tuple[float, Action]]:
    """When it could start, if what it needs is known to end."""
    start_s = rank.free_s
    for each in needs(action, len(pipe.rank_of)):
        if each not in ended:
            return []
        away = pipe.rank_of[each[1]] != pipe.rank_of[action.stage]
        start_s = max(start_s, ended[each] + pipe.costs.send * away)
    return [(start_s, action)]


def _take(
    rank: _Rank, action: Action, start_s: float, pipe: Pipe, ended: dict[Key, float]
) -> None:
    rank.free_s = start_s + pipe.costs.of(action)
    rank.actions.append(action)
    for name in names(action):
        ended[name] = rank.free_s
    if action.kind == "F":
        rank.held += 1
        rank.forward[action.stage] = action.microbatch + 1
    elif action.kind == "I":
        rank.held -= 1 - pipe.weights_share
        rank.back[action.stage] = action.microbatch + 1
        rank.weights.append(Action(stage=action.stage, kind="W", microbatch=action.microbatch))
    else:
        rank.held -= pipe.weights_share
        rank.weights.remove(action)
    assert key(action) in ended
