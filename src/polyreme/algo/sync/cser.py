"""Partial synchronisation with errors that are reset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .. import attacking, exchange
from ..compress import Compressor
from ..compress.dense import Dense
from ..effects import Agree, Program, Record
from ..feedback.kind import Turn
from ..feedback.none import NoFeedback
from .every_step import EveryStep
from .kind import State, gradient, stride

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_RESET = -1


class CSER(EveryStep, frozen=True, kw_only=True, tag="CSER", tag_field="kind"):
    """Workers' models part by what compression takes away, until those errors are averaged too.

    Each step is the rule's own on this worker's gradient: the mean of what `compress` leaves of
    all steps is gone by all, the rest by its worker alone. Every so many steps the rests are
    averaged as far as `reset` leaves them. Nothing is lost, so that a feedback has nothing to add,
    and momentum that it owns is each worker's own. Under gossip there is no mean to part from:
    this is then EveryStep.

    Source: Xie et al. 2020, "CSER: Communication-efficient SGD with Error Reset", algorithms CSER
    and M-CSER, in the order of the authors' program.
    Differs: `params` are what all workers share, w - e, and a worker's own w is params + error,
    so that what they share is equal to the bit. A step that is skipped resets nothing.

    Attributes:
        every: Steps between averages of the errors.
        reset: In what form errors are averaged.
    """

    every: Annotated[int, msgspec.Meta(ge=1)] = 16
    reset: Compressor = Dense()

    @property
    def n_vectors(self) -> int:
        """The error."""
        return 1

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """As at every step; no errors, and the state of exchanges of errors."""
        kept = super().init(algorithm, params, me)
        exact = algorithm.topology.exact
        return {
            **kept,
            "error": params.new_zeros(params.shape),
            "reset": exchange.init(self._resetting(algorithm), params, me) if exact else {},
        }

    def own(self, state: State) -> torch.Tensor:
        """This worker's model, w."""
        own: torch.Tensor = state["params"] + state["error"]
        return own

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A step of one's own, its partial synchronisation, and at times that of errors."""
        if not algorithm.topology.exact:
            return (yield from EveryStep.round(self, algorithm, state, me))
        step, own = state["step"], self.own(state)
        turn = Turn(step=step, lr=me.lr(step))
        came = yield from gradient(algorithm, own, self.batches(state), me)
        (seen,) = yield Agree(batches=(came.numbers,))
        yield Record(step=step + 1, seen=seen, lr=turn.lr)
        after = self.counted(state)
        if seen.skipped:
            return after
        found, kept = exchange.own(
            algorithm, came.gradient * seen.share(me.rank), state["exchange"], turn
        )
        delta, rule, _ = yield from stride(algorithm, own, found, state["rule"], turn.lr, me)
        down, kept = yield from exchange.attacked(-delta, kept, me, turn)  # the paper's delta
        part = yield from exchange.carried(
            algorithm, down, kept, me, turn, silent=attacking.silent(me)
        )
        params, error = state["params"] - part.out, state["error"] - (down - part.sent)
        reset = state["reset"]
        if (step + 1) % self.every == 0:
            draw = me.draw(step).at(_RESET)
            rest = yield from exchange.carried(
                self._resetting(algorithm),
                error,
                reset,
                me,
                turn,
                silent=attacking.silent(me),
                draw=draw,
            )
            params, error, reset = params + rest.out, error - rest.sent, rest.state
        return {
            **after,
            "params": params,
            "error": error,
            "rule": rule,
            "exchange": part.state,
            "reset": reset,
        }

    def _resetting(self, algorithm: DataParallel) -> DataParallel:
        """The algorithm by which errors are averaged."""
        return msgspec.structs.replace(algorithm, compress=self.reset, feedback=NoFeedback())
