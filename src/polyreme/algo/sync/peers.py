"""What syncs have whose workers keep models of their own and exchange these, each in its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from ...errors import Violation, undefined
from ..effects import Numbers, Record, Seen
from . import coming_alone
from .kind import State, SyncKind

if TYPE_CHECKING:
    from ..compose import DataParallel
    from ..packet import Message
    from ..topology.graph.kind import GraphKind
    from ..worker import Worker


class Peers(SyncKind, frozen=True, kw_only=True):
    """Every worker takes the rule's steps on a model of its own; models travel, gradients do not.

    So rules may be any, and topology, aggregate, feedback and compression are as they are unless
    given: models are averaged as they are. A step whose gradient is not finite or has no labels is
    left out. The model that is evaluated is the mean of all workers' that are there.
    """

    in_step: ClassVar[bool] = False
    remembers: ClassVar[bool] = False
    """Whether a server is written down after each message, which must be little then."""
    promise: ClassVar[str] = "nobody waits for another"
    """What is special about it."""

    def gone(self) -> Message:
        """What tells a player that a worker is gone, in its name."""
        raise undefined(self, "gone")

    def anew(self, algorithm: DataParallel, state: State) -> State:
        """The state of a worker that comes, or comes back, and has no model: it asks for one."""
        return {**state, "awaits": False, "new": True}

    def outlasted(self, algorithm: DataParallel, state: State) -> State:
        """A worker's state when the server that it hears of was begun anew from what it was."""
        return self.anew(algorithm, state)

    def again(self, state: State) -> State:
        """A server's state when it, or another, was begun anew, and is what it was before."""
        return state

    def restored(self, state: State) -> State:
        """A server's state when it was begun anew and went back to this one."""
        return self.again(state)

    def models_of(self, n: int) -> range:
        """Players whose states have the models that are evaluated: workers."""
        return range(n)

    def agrees(self, algorithm: DataParallel) -> bool:
        """Each worker has a model of its own."""
        return False

    def refused_with(self, algorithm: DataParallel) -> list[Violation]:
        """Parts of the algorithm that say how gradients travel."""
        return [*coming_alone.refused_with_models(type(self).__name__, algorithm)]


def told(worker: int, row: Numbers, step: int, lr: float, delay: int | None = None) -> Record:
    """What is recorded of a worker's batch: of the run's step that is reckoned from 0."""
    seen = Seen(rows=(row,), apart=True, workers=(worker,))
    delays = () if delay is None else (delay,)
    return Record(step=step + 1, seen=seen, lr=lr, delays=delays)


def unfit(graph: GraphKind, n: int) -> list[Violation]:
    """What forbids the graph of a sync, of which only counts who is whose neighbour."""
    there, here = "data_parallel.topology.graph", "data_parallel.sync.graph"
    return [
        Violation(
            path=each.path.replace(there, here), value=each.value, rule=each.rule, legal=each.legal
        )
        for each in graph.refused(n, columns_only=True)
    ]


def picked(those: Sequence[int], step: int, me: Worker) -> int:
    """One of those, drawn by this player alone."""
    import torch

    if len(those) == 1:
        return those[0]
    return those[int(torch.randint(len(those), (1,), generator=me.draw(step).own()))]
