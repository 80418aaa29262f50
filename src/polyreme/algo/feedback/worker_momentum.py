"""Momentum of each worker's own, sent in the gradient's place."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ..rule.kind import Beta
from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class WorkerMomentum(
    FeedbackKind, frozen=True, kw_only=True, tag="WorkerMomentum", tag_field="kind"
):
    """Each worker sends its momentum; what compression takes away is lost.

    Source: Karimireddy, He and Jaggi 2021, "Learning from History for Byzantine Robust
    Optimization": u = beta u + (1 - beta) g, first u = g. Without dampening it is
    u = beta u + g, and with all sent and a mean that of SGD.

    Attributes:
        momentum: Share of the worker's last momentum.
        dampened: Whether the gradient's share is 1 - momentum, so that momentum is a mean.
    """

    owns_momentum: ClassVar[bool] = True
    momentum: Beta = 0.9
    dampened: bool = True

    @property
    def vectors(self) -> tuple[str, ...]:
        """Momentum."""
        return ("momentum_buffer",)

    def init(self, params: torch.Tensor) -> State:
        """No momentum, and no gradient seen."""
        return {**super().init(params), "started": 0}

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The momentum."""
        share = 1 - self.momentum if self.dampened and state["started"] else 1.0
        kept = state["momentum_buffer"] * self.momentum + gradient * share
        return kept, {"momentum_buffer": kept, "started": 1}
