"""Adam whose momentum can be compressed, once its variance stands still."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..rule.kind import Beta, Positive
from .kind import FeedbackKind, State, Turn

if TYPE_CHECKING:
    import torch


class OneBitAdam(FeedbackKind, frozen=True, kw_only=True, tag="OneBitAdam", tag_field="kind"):
    """Adam on dense gradients first; then error feedback on momentum, over a frozen variance.

    The gradient that the rule is given is m / (sqrt(v) + eps): with SGD as the rule the whole is
    the paper's algorithm, without bias correction as there; weight decay is then decoupled.

    Source: Tang et al. 2021, "1-bit Adam", algorithm 1.
    The paper's server compresses too, with an error of its own: that is the topology's
    (ParameterServer with `back`); elsewhere the mean comes back as it is.

    Attributes:
        warmup: Steps of plain Adam, in which gradients are sent dense.
        betas: Decay of the mean of gradients, and of their squares.
        eps: Added to the root of the squares.
    """

    owns_momentum: ClassVar[bool] = True
    alone: ClassVar[bool] = False
    warmup: Annotated[int, msgspec.Meta(ge=1)] = 1000
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8

    @property
    def vectors(self) -> tuple[str, ...]:
        """Both means, the same on all workers, and what was not sent."""
        return ("exp_avg", "exp_avg_sq", "error")

    def sends_all(self, turn: Turn) -> bool:
        """While Adam is plain."""
        return turn.step < self.warmup

    def prepare(
        self, gradient: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """The gradient; later on, the mean that it would lead to and what was not sent."""
        if self.sends_all(turn):
            return gradient, state
        return state["exp_avg"].lerp(gradient, 1 - self.betas[0]) + state["error"], state

    def settle(
        self, prepared: torch.Tensor, sent: torch.Tensor, kept: torch.Tensor, state: State
    ) -> State:
        """What was not sent."""
        return {**state, "error": prepared - sent}

    def receive(
        self, combined: torch.Tensor, state: State, turn: Turn
    ) -> tuple[torch.Tensor, State]:
        """Adam's direction."""
        first, second = self.betas
        mean, squares = combined, state["exp_avg_sq"]
        if self.sends_all(turn):
            mean = state["exp_avg"].lerp(combined, 1 - first)
            squares = (squares * second).addcmul(combined, combined, value=1 - second)
        after = {**state, "exp_avg": mean, "exp_avg_sq": squares}
        return mean / (squares.sqrt() + self.eps), after
