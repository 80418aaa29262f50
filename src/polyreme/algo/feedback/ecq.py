"""Error compensation that fades."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ..rule.kind import NotNegative
from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class ECQ(FeedbackKind, frozen=True, kw_only=True, tag="ECQ", tag_field="kind"):
    """Adds a share of all that quantisation took away, older errors counting less.

    Source: Wu et al. 2018, "Error Compensated Quantized SGD", algorithm 1: q = Q(g + alpha h),
    h' = beta h + g - q. With alpha and beta 1 this is error feedback with the rate outside.

    Attributes:
        alpha: Share of the error that is added to the gradient.
        beta: Share of the former error that is kept.
    """

    alpha: NotNegative = 0.2
    beta: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.9

    @property
    def vectors(self) -> tuple[str, ...]:
        """The fading sum of errors."""
        return ("error",)

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient and a share of the error."""
        return gradient + self.alpha * state["error"], state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """The error: what was sent is taken off the gradient, which is prepared - alpha h."""
        return {"error": (self.beta - self.alpha) * state["error"] + (prepared - sent)}
