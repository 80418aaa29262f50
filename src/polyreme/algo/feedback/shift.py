"""Differences to what the others know already are sent, not gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class DIANA(FeedbackKind, frozen=True, kw_only=True, tag="DIANA", tag_field="kind"):
    """Each worker's gradient less a shift that learns it; for unbiased compressors.

    Source: Mishchenko et al. 2019, "Distributed Learning with Compressed Gradient Differences",
    algorithm 1: q = Q(g - h), the step is along mean(h + q), h' = h + alpha q.
    Differs: no server, so each worker keeps the mean of all shifts.

    Attributes:
        alpha: Share of what was sent that the shift takes up; at most 1 / (1 + omega) for
            compressors of variance omega |x|^2. 0 learns nothing.
    """

    remembers: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    alpha: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1

    @property
    def vectors(self) -> tuple[str, ...]:
        """This worker's shift, and the mean of all."""
        return ("shift", "mean_shift")

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient less the shift."""
        return gradient - state["shift"], state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """The shift takes up what was sent."""
        return {**state, "shift": state["shift"] + self.alpha * sent}

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The mean shift and the aggregate; the mean shift takes up the aggregate."""
        mean = state["mean_shift"]
        return mean + combined, {**state, "mean_shift": mean + self.alpha * combined}


class EF21(FeedbackKind, frozen=True, kw_only=True, tag="EF21", tag_field="kind"):
    """Each worker's gradient less an estimate that takes up all that was sent.

    Source: Richtarik, Sokolov and Fatkhullin 2021, "EF21", algorithm 2: c = C(g - e),
    e' = e + c, the step is along mean(e'). Estimates start at zero, so that the first is C(g).
    Differs: no master, so each worker keeps the mean of all estimates.
    """

    remembers: ClassVar[bool] = True
    alone: ClassVar[bool] = False

    @property
    def vectors(self) -> tuple[str, ...]:
        """This worker's estimate, and the mean of all."""
        return ("estimate", "mean_estimate")

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient less its estimate."""
        return gradient - state["estimate"], state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """The estimate as the others know it."""
        return {**state, "estimate": state["estimate"] + sent}

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The mean of all estimates."""
        mean = state["mean_estimate"] + combined
        return mean, {**state, "mean_estimate": mean}
