"""Momentum as old as the gradient that it is added to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..push import Push
from .kind import State
from .momentum import ServedMomentum

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class ShiftedMomentum(
    ServedMomentum, frozen=True, kw_only=True, tag="ShiftedMomentum", tag_field="kind"
):
    """A gradient is added to the momentum that was when its parameters were sent.

    v = beta v' + g, w = w - lr v, where v' is that of the step after which the worker was
    answered. A server keeps one momentum for each worker.

    Source: Giladi et al. 2020, "At Stability's Edge: How to Adjust Hyperparameters to Preserve
    Minima Selection in Asynchronous Training of Neural Networks?" (restated from memory).

    Attributes:
        servers: How many servers there are.
        ahead: 0, as it keeps the momentum of one answer to each worker.
        momentum: Share of the momentum that is kept.
    """

    not_ahead: ClassVar[str] = "keeps the momentum of one answer to each worker"

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """The momentum that each worker was last answered with."""
        zero = piece.new_zeros(piece.shape)
        return {"momentum": {str(worker): zero for worker in range(me.n)}}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """A step along the gradient and that worker's momentum."""
        (found,) = push.vectors
        own = self.momentum * state["momentum"][str(push.worker)] + found
        return {
            "params": state["params"] - lr * own,
            "momentum": {**state["momentum"], str(push.worker): own},
        }
