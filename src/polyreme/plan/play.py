"""An order of pipeline actions, played on a clock: seconds, idle time, what is alive at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from .ir import Action

Key = tuple[str, int, int, int]  # kind, stage, microbatch, token slice
Actions = Sequence[Sequence[Action]]  # of each rank of the pipeline


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a stage's passes over one microbatch, and of a tensor from stage to stage.

    A backward pass B takes `inputs` + `weights`. With token slices a pass is one slice's.
    """

    forward: tuple[float, ...]
    inputs: tuple[float, ...]
    weights: tuple[float, ...]
    send: float = 0.0

    @classmethod
    def equal(
        cls, n_stages: int, *, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0
    ) -> Costs:
        """Of stages that are alike."""
        return cls(
            forward=(forward,) * n_stages,
            inputs=(inputs,) * n_stages,
            weights=(weights,) * n_stages,
        )

    def of(self, action: Action) -> float:
        """Seconds of one action; an update takes none."""
        stage = action.stage
        return {
            "F": self.forward[stage],
            "I": self.inputs[stage],
            "W": self.weights[stage],
            "B": self.inputs[stage] + self.weights[stage],
            "U": 0.0,
        }[action.kind]


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


class Stuck(Exception):
    """No rank can go on; `waits` holds where each stands and for what: who waits for whom."""

    def __init__(self, waits: Mapping[int, tuple[Action, Key]]) -> None:
        self.waits = waits
        super().__init__(", ".join(f"rank {rank}: {_shown(*each)}" for rank, each in waits.items()))


def play(actions: Actions, n_stages: int, costs: Costs) -> Played:
    """Each rank's actions in its order, each as soon as what it needs is there.

    Raises:
        Stuck: they wait for each other.
    """
    device: dict[Key, int] = {}
    for rank, own in enumerate(actions):
        device |= {name: rank for action in own for name in names(action)}
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
            missing = next((each for each in needed if each not in ended), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            start_s = free_s[rank]
            for each in needed:
                start_s = max(start_s, ended[each] + costs.send * (device[each] != rank))
            free_s[rank] = start_s + costs.of(action)
            spans[rank].append(Span(action, start_s, free_s[rank]))
            for name in names(action):
                ended[name] = free_s[rank]
                able += waiting.pop(name, [])
    if waiting:
        raise Stuck(
            {
                rank: (actions[rank][len(spans[rank])], each)
                for each, ranks in waiting.items()
                for rank in ranks
            }
        )
    return Played(spans=tuple(map(tuple, spans)))


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


def _shown(action: Action, missing: Key) -> str:
    own = key(action)
    return (
        f"{own[0]}{own[2]} of stage {own[1]} waits for {missing[0]}{missing[2]} of stage "
        f"{missing[1]}"
    )
