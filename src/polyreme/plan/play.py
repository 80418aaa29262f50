"""An order of pipeline actions, played on a clock: seconds, idle time, what is alive at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .ir import Action
from .ir import Costs as Costs

Key = tuple[str, int, int, int]  # kind, stage, microbatch, token slice
Actions = Sequence[Sequence[Action]]  # of each rank of the pipeline


class Span(msgspec.Struct, frozen=True):
    """One action and when it was played, in seconds since the step began."""

    action: Action
    start_s: float
    end_s: float


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it went, rank by rank."""

    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Until the last rank has ended."""
        return max((spans[-1].end_s for spans in self.spans if spans), default=0.0)

    def bubble_s(self, rank: int) -> float:
        """Seconds of the step in which a rank plays nothing."""
        return self.makespan_s - sum(span.end_s - span.start_s for span in self.spans[rank])

    def idle_s(self, rank: int) -> float:
        """Seconds in which a rank plays nothing between its first action and its last."""
        spans = self.spans[rank]
        busy = sum(span.end_s - span.start_s for span in spans)
        return spans[-1].end_s - spans[0].start_s - busy if spans else 0.0

    def peak(self, rank: int, *, weights_share: float = 1.0) -> float:
        """The most passes forward that a rank holds at once, in chunks of one stage.

        A backward pass frees what its forward pass held; of two halves W frees `weights_share` of
        it and I the rest.
        """
        freed = {"F": 1.0, "B": -1.0, "I": weights_share - 1.0, "W": -weights_share, "U": 0.0}
        held = most = 0.0
        for span in self.spans[rank]:
            held += freed[span.action.kind]
            most = max(most, held)
        return most


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that cannot go on: what it would play, what it needs, and who plays that later."""

    rank: int
    action: Action
    missing: Key
    giver: int | None
    given: Action | None

    def __str__(self) -> str:
        return f"rank {self.rank}: {show(key(self.action))} {self.said('rank', self.giver)}"

    def said(self, who: str, giver: int | None) -> str:
        """What it waits for and of whom, where ranks are called `who`."""
        if self.given is None:
            return f"waits for {show(self.missing)}, which nobody plays"
        return f"waits for {show(key(self.given))}, which {who} {giver} plays later"


class Stuck(Exception):
    """No rank can go on.

    `waits` says where each rank stands and for what; `circle` names those that wait for each
    other, and is empty where what is waited for is played by nobody.
    """

    def __init__(self, waits: Mapping[int, Wait]) -> None:
        self.waits = waits
        self.circle = _circle(waits)
        super().__init__("; ".join(map(str, self.circle or waits.values())))


def play(actions: Actions, n_stages: int, costs: Costs) -> Played:
    """Each rank's actions in its order, each as soon as what it needs is there.

    Where several ranks play the same action, as those that share a stage do, it is there when the
    last of them has ended.

    Raises:
        Stuck: they wait for each other.
    """
    holders: dict[Key, set[int]] = {}
    for rank, own in enumerate(actions):
        for action in own:
            for name in names(action):
                holders.setdefault(name, set()).add(rank)
    left = {name: len(ranks) for name, ranks in holders.items()}
    ended: dict[Key, float] = {}
    spans: list[list[Span]] = [[] for _ in actions]
    free_s = [0.0] * len(actions)
    waiting: dict[Key, list[int]] = {}
    able = list(range(len(actions)))
    while able:
        rank = able.pop()
        while len(spans[rank]) < len(actions[rank]):
            action = actions[rank][len(spans[rank])]
            needed = needs(action, n_stages)
            missing = next((each for each in needed if left.get(each, 1)), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start_s = free_s[rank]
            for each in needed:
                start_s = max(start_s, ended[each] + costs.send * (rank not in holders[each]))
            free_s[rank] = start_s + costs.of(action)
            spans[rank].append(Span(action, start_s, free_s[rank]))
            for name in names(action):
                ended[name] = max(ended.get(name, 0.0), free_s[rank])
                left[name] -= 1
                if not left[name]:
                    able += waiting.pop(name, [])
    if waiting:
        raise Stuck(_waits(actions, spans, waiting))
    return Played(spans=tuple(map(tuple, spans)))


def _waits(
    actions: Actions, spans: Sequence[Sequence[Span]], waiting: Mapping[Key, Sequence[int]]
) -> dict[int, Wait]:
    """Of each rank that stands: for what, and a rank that has yet to play it."""
    givers: dict[Key, tuple[int, Action]] = {}
    for rank, own in enumerate(actions):
        for action in own[len(spans[rank]) :]:
            givers |= {name: (rank, action) for name in names(action) if name in waiting}
    found = {
        rank: Wait(
            rank=rank,
            action=actions[rank][len(spans[rank])],
            missing=missing,
            giver=givers[missing][0] if missing in givers else None,
            given=givers[missing][1] if missing in givers else None,
        )
        for missing, ranks in waiting.items()
        for rank in ranks
    }
    return dict(sorted(found.items()))


def _circle(waits: Mapping[int, Wait]) -> tuple[Wait, ...]:
    """From any rank along who is waited for, until one comes again."""
    path: list[int] = []
    rank: int | None = next(iter(waits), None)
    while rank is not None and rank not in path:
        path.append(rank)
        rank = waits[rank].giver if rank in waits else None
    return () if rank is None else tuple(waits[each] for each in path[path.index(rank) :])


def needs(action: Action, n_stages: int) -> list[Key]:
    """What must have ended before an action starts."""
    kind, stage, microbatch, piece = key(action)
    if kind == "F":
        before = [("F", stage - 1, microbatch, piece)] if stage else []
        return [*before, ("F", stage, microbatch, piece - 1)] if piece else before
    if kind in "BI":
        own = ("F", stage, microbatch, piece)
        return [own, ("I", stage + 1, microbatch, piece)] if stage < n_stages - 1 else [own]
    return [("I", stage, microbatch, piece)] if kind == "W" else []


def names(action: Action) -> list[Key]:
    """What has ended with an action: a whole backward pass is both halves."""
    own = key(action)
    return [own, ("I", *own[1:]), ("W", *own[1:])] if action.kind == "B" else [own]


def key(action: Action) -> Key:
    """What tells an action from all others of a step."""
    return (action.kind, action.stage, action.microbatch, action.token_slice)


def show(name: Key) -> str:
    """An action in words.

    >>> show(("F", 1, 2, 0))
    'F2 of stage 1'
    """
    kind, stage, microbatch, piece = name
    return f"{kind}{microbatch}{f'.{piece}' if piece else ''} of stage {stage}"
