"""Workers that stay silent while others know enough of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import undefined
from .. import attacking, exchange
from ..effects import Program
from ..norm import length
from ..rule.kind import NotNegative
from .every_step import EveryStep
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..feedback.kind import Turn
    from ..worker import Worker


class Lazy(EveryStep, frozen=True, kw_only=True):
    """At every step each worker sends what the others lack of its gradient, or nothing.

    All keep the mean of what was last known of each, along which the rule steps. The difference
    goes through `compress`; packets that may be empty do not add, so topologies gather them.
    A feedback says what of the gradient is meant to be known, and what is known counts as sent.
    Compressors that work in rounds have all workers take part, a silent one with zeros. Aggregates
    other than the mean are of differences. Under gossip gradients stay with their worker, so that
    this is EveryStep.
    """

    adds_up: ClassVar[bool] = True

    @property
    def n_vectors(self) -> int:
        """What is known of this worker, and the mean of all."""
        return 2

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """As at every step; nothing is known."""
        zero = params.new_zeros(params.shape)
        return {
            **super().init(algorithm, params, me),
            "known": {"own": zero, "mean": zero, **self.watched(params)},
        }

    def watched(self, params: torch.Tensor) -> State:
        """What else is kept to tell whether to be silent, before the first step."""
        raise undefined(self, "watched")

    def lazy(
        self, aim: torch.Tensor, lacks: torch.Tensor, known: State
    ) -> Program[tuple[bool, State]]:
        """Whether to be silent where others lack that much of what is meant; what else is kept."""
        raise undefined(self, "lazy")

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
        """The mean of what is known, after the difference was sent or not."""
        if not algorithm.topology.exact:
            return (
                yield from EveryStep.given(
                    self, algorithm, found, state, me, turn, silent, expected
                )
            )
        feedback, known = algorithm.feedback, state["known"]
        aim, kept = feedback.prepare(found, state["exchange"]["feedback"], turn)
        aim, exchanged = yield from exchange.attacked(aim, state["exchange"], me, turn)
        lacks = aim - known["own"]
        enough, watched = yield from self.lazy(aim, lacks, known)
        came = yield from exchange.carried(
            algorithm,
            lacks,
            exchanged,
            me,
            turn,
            silent=attacking.silent(
                me, None if feedback.sends_all(turn) else bool(silent) or enough
            ),
        )
        own, mean = known["own"] + came.sent, known["mean"] + came.out
        kept = feedback.settle(aim, own, came.named, kept)
        out, kept = feedback.receive(mean, kept, turn)
        return out, {
            "exchange": {**came.state, "feedback": kept},
            "known": {"own": own, "mean": mean, **watched},
        }


class LAG(Lazy, frozen=True, kw_only=True, tag="LAG", tag_field="kind"):
    """Workers whose gradient has changed little, next to recent steps, send nothing.

    Silent is a worker with |g - y|^2 <= xi (|m_1|^2 + ... + |m_D|^2), where y is what is known of
    it and m_d the mean of d steps ago. At xi 0 all send all that changes.

    Source: Chen et al. 2018, "LAG: Lazily Aggregated Gradient for Communication-Efficient
    Distributed Learning", algorithm LAG-WK.
    Differs: gradients are of batches; m_d stands for the paper's (w - w') / lr of d steps ago,
    which it is under SGD without momentum or decay, so that any rule and rate may follow.

    Attributes:
        xi: Share of each of the last steps in what counts as little.
        depth: How many of the last steps count (D).
    """

    xi: NotNegative = 0.1
    depth: Annotated[int, msgspec.Meta(ge=1)] = 10

    def watched(self, params: torch.Tensor) -> State:
        """Squared lengths of the means before the last, the newest first."""
        import torch

        return {"squares": torch.zeros(self.depth, dtype=torch.float64)}

    def lazy(
        self, aim: torch.Tensor, lacks: torch.Tensor, known: State
    ) -> Program[tuple[bool, State]]:
        """Where what is lacking is short; the last mean's length takes the oldest one's place."""
        squares = known["squares"].roll(1)
        squares[0] = (yield from length(known["mean"])) ** 2
        square = (yield from length(lacks)) ** 2
        return square <= self.xi * float(squares.sum()), {"squares": squares}


class ThreePoint(Lazy, frozen=True, kw_only=True, tag="ThreePoint", tag_field="kind"):
    """Lazy three-point compression: a worker is silent while what is known of it is near enough.

    Silent is a worker with |g - h|^2 <= zeta |g - y|^2, where h is what is known of it and y its
    last gradient; the others get C(g - h) (CLAG). With Dense this is LAG in that paper's form, at
    zeta 0 it is EF21. The first gradient is always sent.

    Source: Richtarik et al. 2022, "3PC: Three Point Compressors for Communication-Efficient
    Distributed Training and a Better Theory for Lazy Aggregation", algorithms 3PC and CLAG.
    Differs: gradients are of batches.

    Attributes:
        zeta: How far what is known may be from the gradient, next to the gradient's last change.
    """

    zeta: NotNegative = 1.0

    @property
    def n_vectors(self) -> int:
        """The last gradient too."""
        return 3

    def watched(self, params: torch.Tensor) -> State:
        """The last gradient, and whether there was any."""
        return {"last": params.new_zeros(params.shape), "started": False}

    def lazy(
        self, aim: torch.Tensor, lacks: torch.Tensor, known: State
    ) -> Program[tuple[bool, State]]:
        """Where what is lacking is no longer than the last change; this gradient is kept."""
        lacking = yield from length(lacks)
        change = yield from length(aim - known["last"])
        enough = known["started"] and lacking**2 <= self.zeta * change**2
        return enough, {"last": aim, "started": True}
