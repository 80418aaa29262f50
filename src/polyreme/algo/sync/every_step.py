"""Synchronous training: an exchange at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import exchange
from ..effects import Agree, Program, Record
from ..feedback.kind import Turn
from .kind import State, SyncKind, gradient, mixed, moved

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class EveryStep(SyncKind, frozen=True, kw_only=True, tag="EveryStep", tag_field="kind"):
    """All replicas average their gradients at every step (synchronous SGD).

    A step in which a worker's loss or gradient is not finite is skipped by all. Workers count by
    the labels that carry loss in their batches; one that has none adds zero to a mean, and no row
    to any other aggregate. A robust aggregate counts all alike, and the step goes on without
    workers that are not finite if it bears so many. Under gossip each steps along its own
    gradient, then models are mixed.

    Source: Chen et al. 2016, "Revisiting Distributed Synchronous SGD".
    """

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A gradient, its exchange, an update; under gossip, an update and the model's exchange."""
        params, step = state["params"], state["step"]
        turn = Turn(step=step, lr=me.lr(step))
        at = algorithm.feedback.at(params, state["exchange"]["feedback"])
        own = yield from gradient(algorithm, at, self.batches(state), me)
        (seen,) = yield Agree(batches=(own.numbers,))
        seen = seen.borne(algorithm.aggregate.bears)
        after = self.counted(state)
        if seen.skipped:
            yield Record(step=step + 1, seen=seen, lr=turn.lr)
            return after
        counts = [row.weight > 0 for row in seen.rows]
        silent = None if algorithm.aggregate.is_mean or all(counts) else not counts[me.rank]
        share = 1.0 if algorithm.aggregate.robust else seen.share(me.rank)
        expected = sum(bool(row.weight or not row.finite) for row in seen.rows)
        found, changed = yield from self.given(
            algorithm, own.gradient * share, state, me, turn, silent, expected
        )
        params, rule, norm = yield from moved(algorithm, params, found, state["rule"], turn.lr, me)
        grad_norm = norm if algorithm.topology.exact else None
        yield Record(step=step + 1, seen=seen, lr=turn.lr, grad_norm=grad_norm)
        params, exchanged = yield from mixed(algorithm, params, changed["exchange"], me, turn)
        return {**after, **changed, "params": params, "rule": rule, "exchange": exchanged}

    def batches(self, state: State) -> Sequence[int]:
        """Which batches of its own a worker takes for a step."""
        step: int = state["step"]
        return (step,)

    def counted(self, state: State) -> State:
        """The state with a step more, and nothing else."""
        return {**state, "step": state["step"] + 1}

    def given(
        self,
        algorithm: DataParallel,
        found: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        silent: bool | None,
        expected: int,
    ) -> Program[tuple[torch.Tensor, State]]:
        """What the rule is given, and the entries of the state that change by it.

        `silent` is None where all workers have a gradient, else whether this one has none;
        `expected` have one, or one that is not finite.
        """
        kept = state["exchange"]
        if algorithm.topology.exact:
            found, kept = yield from exchange.combined(
                algorithm, found, kept, me, turn, silent=silent, expected=expected
            )
        else:
            found, kept = exchange.own(algorithm, found, kept, turn)
        return found, {"exchange": kept}
