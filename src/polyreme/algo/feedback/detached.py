"""Detached error feedback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class DEF(FeedbackKind, frozen=True, kw_only=True, tag="DEF", tag_field="kind"):
    """Error feedback whose gradients are taken where part of what waits were already done.

    Source: derived from the authors' program for Xu and Huang 2022, "Detached Error Feedback for
    Distributed SGD with Random Sparsification" (github.com/anxuthu/DEF): p = lr g + e with g at
    w - coefficient e; e' = p - C(p). Their evaluation at w - mean e (DEF-A) is left out.
    Differs: their program has momentum on each worker, before compression; here it is the rule's.

    Attributes:
        coefficient: Share of this worker's error that its gradient foresees; 0 is error feedback.
    """

    coefficient: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.3

    @property
    def vectors(self) -> tuple[str, ...]:
        """What was not sent, in steps."""
        return ("error",)

    def at(self, params: torch.Tensor, state: State) -> torch.Tensor:
        """The weights after part of the steps that wait."""
        return params.sub(state["error"], alpha=self.coefficient)

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The step and what was not sent."""
        return gradient * turn.lr + state["error"], state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """What was not sent."""
        return {"error": prepared - sent}

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The mean, as a gradient; none at a rate of 0."""
        return (combined / turn.lr if turn.lr else combined.new_zeros(combined.shape)), state
