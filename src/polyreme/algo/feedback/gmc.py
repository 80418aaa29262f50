"""Global momentum compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..rule.kind import Beta
from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class GMC(FeedbackKind, frozen=True, kw_only=True, tag="GMC", tag_field="kind"):
    """Error feedback with the momentum of the last global step, the same on all workers.

    Source: Zhao et al. 2019, "Global Momentum Compression for Sparse Communication in Distributed
    Learning", algorithm 1: p = e + g - beta / lr (w_t - w_{t-1}).
    Differs: as SGD's last step was -lr' a of the last aggregate a, its share is beta a lr' / lr,
    which needs no former weights; what another rule or clipping made of a is not in it. At a rate
    of 0 there is no such share.

    Attributes:
        momentum: Share of the last global step.
    """

    owns_momentum: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    momentum: Beta = 0.9

    @property
    def vectors(self) -> tuple[str, ...]:
        """What was not sent, and the last global step."""
        return ("error", "last_step")

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient, what was not sent, and the last global step."""
        share = self.momentum / turn.lr if turn.lr else 0.0
        return state["error"] + gradient + state["last_step"] * share, state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """What was not sent."""
        return {**state, "error": prepared - sent}

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The mean; its step is kept."""
        return combined, {**state, "last_step": combined * turn.lr}
