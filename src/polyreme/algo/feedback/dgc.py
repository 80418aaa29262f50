"""Deep gradient compression: momentum of each worker's own, corrected for what waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..rule.kind import Beta
from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class DGC(FeedbackKind, frozen=True, kw_only=True, tag="DGC", tag_field="kind"):
    """Momentum correction: sums of each worker's momentum are sent.

    Source: Lin et al. 2018, "Deep Gradient Compression", algorithm 4.
    Differs: the weight decay is that of the rule.

    Attributes:
        momentum: Share of the worker's last momentum.
        nesterov: Whether momentum is taken as if one step ahead.
        masking: Whether entries that were sent lose their momentum (momentum factor masking).
    """

    owns_momentum: ClassVar[bool] = True
    momentum: Beta = 0.9
    nesterov: bool = False
    masking: bool = True

    @property
    def vectors(self) -> tuple[str, ...]:
        """Momentum, and what was not sent of its sum."""
        return ("momentum_buffer", "error")

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The sum of what was not sent and the momentum."""
        if self.nesterov:
            kept = (state["momentum_buffer"] + gradient) * self.momentum
            prepared = state["error"] + kept + gradient
        else:
            kept = state["momentum_buffer"] * self.momentum + gradient
            prepared = state["error"] + kept
        return prepared, {**state, "momentum_buffer": kept}

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """What was not sent; entries that were lose their momentum if so told."""
        momentum = state["momentum_buffer"]
        if self.masking:
            momentum = momentum.masked_fill(kept, 0.0)
        return {"momentum_buffer": momentum, "error": prepared - sent}
