"""Error feedback: what was not sent is added to what is sent next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class ErrorFeedback(FeedbackKind, frozen=True, kw_only=True, tag="ErrorFeedback", tag_field="kind"):
    """Adds what was not sent to what is sent next.

    Source: Seide et al. 2014; Stich, Cordonnier and Jaggi 2018, algorithm 1 (rate inside);
    Karimireddy et al. 2019, algorithm 2.

    Attributes:
        rate: Whether the memory holds gradients ("outside") or steps, that is gradients times the
            learning rate of their time ("inside", as in the papers); the same at a constant rate.
    """

    rate: Literal["inside", "outside"] = "inside"

    @property
    def vectors(self) -> tuple[str, ...]:
        """What was not sent."""
        return ("error",)

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient (or step) and what was not sent."""
        return gradient * (turn.lr if self.rate == "inside" else 1.0) + state["error"], state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """What was not sent."""
        return {"error": prepared - sent}

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The mean, as a gradient; at a rate of 0 steps are none, and what was sent is lost."""
        if self.rate == "outside":
            return combined, state
        return (combined / turn.lr if turn.lr else combined.new_zeros(combined.shape)), state
