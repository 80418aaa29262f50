"""What members that have servers say: what workers push, what servers do with it and answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation, undefined
from ..effects import Numbers, Program, Split, settled
from ..push import LEFT, Push
from .kind import State, SyncKind, clipped, gradient, undecayed

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a worker pushes, and the entries of its state that change by it."""

    vectors: tuple[torch.Tensor, ...]
    rows: tuple[Numbers, ...]
    changed: State

    @property
    def counts(self) -> bool:
        """Whether all of it is finite and some label carries loss."""
        return all(row.finite for row in self.rows) and any(row.weight for row in self.rows)


class ServedKind(SyncKind, frozen=True, kw_only=True):
    """What a sync with servers says: what workers push, and what servers do with it and answer.

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
    """

    in_step: ClassVar[bool] = False
    n_pushed: ClassVar[int] = 1
    """Vectors of a push."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Vectors of a server's state that are sent beside the parameters, to the worker's state."""
    owns_momentum: ClassVar[bool] = False
    """Whether the momentum is the sync's, so that the rule must have none and be SGD."""
    steps_at_worker: ClassVar[bool] = False
    """Whether the rule is played by workers, each with a state of its own, and not by servers."""
    settles: ClassVar[bool] = False
    """Whether servers end steps that workers began, where the rule's changes do not add up."""
    pushes_steps: ClassVar[bool] = False
    """Whether what is pushed has the learning rate in it; it has where workers play the rule."""
    decays_at_worker: ClassVar[bool] = False
    """Whether weight decay as that of a penalty is in what is pushed; momentum's always is."""
    one_server: ClassVar[str] = ""
    """Why pieces at several servers would not go together, if they would not."""

    by_version: ClassVar[bool] = False
    """Whether an answer's version alone says which pushes of a worker it is of."""
    not_ahead: ClassVar[str] = ""
    """What it does that goes with no more than one unanswered push of a worker, if it does."""
    whole_answers: ClassVar[str] = ""
    """What it does that goes with answers as they are, and not with compressed ones, if it does."""

    aggregates: ClassVar[bool] = False
    """Whether a server makes its steps of the algorithm's aggregate."""
    distrusts: ClassVar[bool] = False
    """Whether a server looks itself whether what came is finite, and takes no worker's word."""

    promise: ClassVar[str] = "nobody waits for another"
    """What is special about it."""

    servers: Annotated[int, msgspec.Meta(ge=1)] = 1
    ahead: Annotated[int, msgspec.Meta(ge=0)] = 0

    def own(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """What a worker keeps of its own beside parameters and exchanges, by its names."""
        return {}

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """What a server keeps beside its piece of the parameters, by its names."""
        return {}

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """What a worker does with parameters: one gradient of its next batch."""
        kept = state["exchange"]["0"]["feedback"]
        at = algorithm.feedback.at(state["params"], kept)
        held, numbers = yield from self.found(algorithm, at, state["step"], me)
        return Work(vectors=(held,), rows=(numbers,), changed={})

    def found(
        self, algorithm: DataParallel, at: torch.Tensor, batch: int, me: Worker
    ) -> Program[tuple[torch.Tensor, Numbers]]:
        """The gradient of a batch, held to the bound, and what is to be known of it.

        That of the penalty is in it where the rule's step is not taken.
        """
        own = yield from gradient(algorithm, at, (batch,), me)
        held = own.gradient if me.clip_norm is None else clipped(own.gradient, me.clip_norm)
        decays = self.owns_momentum or self.decays_at_worker
        if algorithm.feedback.owns_momentum or not decays:  # it is in already, or never
            return held, own.numbers
        decay = algorithm.rule.coupled_decay
        return (held.add(at, alpha=decay) if decay else held), own.numbers

    def due(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[Push]]:
        """Entries that change, and what is dealt with now, in order: what came."""
        return {}, (push,)

    def takes(self, state: State, push: Push) -> bool:
        """Whether a push that counts is applied."""
        return True

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State | Program[State]:
        """The entries of a server's state that change by a push that counts.

        A program of them asks for sums over shards or the time, or names suspects.
        """
        raise undefined(self, "applied")

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """The entries of a server's state that change by any push, whether or not it counts."""
        return {}

    def met(
        self, algorithm: DataParallel, state: State, lr: float, me: Worker
    ) -> State | Program[State]:
        """The entries of a server's state that change once enough have come.

        Asked after every push, and when a worker came or is gone. A program of them may ask for
        what that of `applied` may.
        """
        return {}

    def answered(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[int]]:
        """Entries that change, and the workers that are answered after a push: its own.

        Also asked when a worker came or is gone, which `state["present"]` says by then.
        """
        return {}, () if push.number == LEFT else (push.worker,)

    def owes(self, state: State, worker: int) -> bool:
        """Whether a server has yet to answer a worker's push.

        Where all are answered at once it has not; other members have `waits`, which says it.
        """
        return bool("waits" in state and state["waits"][str(worker)])

    def answer(self, state: State, worker: int, me: Worker) -> torch.Tensor:
        """What a server sends a worker: the piece of the parameters."""
        params: torch.Tensor = state["params"]
        return params

    def joined(self, state: State, own: torch.Tensor, came: torch.Tensor) -> torch.Tensor:
        """A piece of a worker's parameters, from what it was and what a server sent: the latter."""
        return came

    def awaits(self, push: int) -> bool:
        """Whether a worker waits for an answer to its push of that number."""
        return True

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """What this member cannot go with beyond what none can."""
        return []

    # What they are made of ----------------------------------------------------------------------

    def ruled(
        self, algorithm: DataParallel, state: State, found: torch.Tensor, lr: float, me: Worker
    ) -> Split[State]:
        """Parameters and the rule's state after a step of it at a server."""
        rule, params = algorithm.rule, state["params"]
        if algorithm.feedback.owns_momentum or self.decays_at_worker:
            rule = undecayed(rule)
        layout = me.layout.pieces(self.servers)[me.rank - me.n]
        delta, kept = yield from settled(
            rule.update(found, state["rule"], params, lr=lr, layout=layout)
        )
        return {"params": params + delta, "rule": kept}

    def ending(self, algorithm: DataParallel, piece: torch.Tensor) -> State:
        """What a server keeps of a rule whose steps it ends."""
        return {"ending": algorithm.rule.init(piece)} if algorithm.rule.settles else {}

    def ended(
        self, algorithm: DataParallel, state: State, params: torch.Tensor, lr: float, me: Worker
    ) -> State:
        """Parameters that workers' steps were added to, after what ends these."""
        rule = algorithm.rule
        if not rule.settles:
            return {"params": params}
        layout = me.layout.pieces(self.servers)[me.rank - me.n]
        params, kept = rule.settle(params, state["ending"], lr=lr, layout=layout)
        return {"params": params, "ending": kept}

    def rate(self, state: State, me: Worker) -> float:
        """The learning rate where a worker is, by the first server's version."""
        return me.lr(state["versions"]["0"] // me.n * self.per_push)
