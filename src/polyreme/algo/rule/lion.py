"""Lion: signs of a mean that looks less far back than the one that is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .kind import Beta, Positive, RuleKind, State

if TYPE_CHECKING:
    import torch

    from ..vector import Layout


class Lion(RuleKind, frozen=True, kw_only=True, tag="Lion", tag_field="kind"):
    """Signed momentum with decoupled weight decay. Source: Chen et al. 2023, algorithm 2.

    Attributes:
        lr: Learning rate, before the schedule: the step of every entry.
        betas: Decay of the mean in the step, and of the mean that is kept.
        weight_decay: Share of the weights, times the learning rate, taken off in each step.
    """

    lr: Positive = 1e-4
    betas: tuple[Beta, Beta] = (0.9, 0.99)

    @property
    def keeps_momentum(self) -> bool:
        """Unless its share is 0."""
        return self.betas[0] > 0

    @property
    def vectors(self) -> tuple[str, ...]:
        """The mean."""
        return ("exp_avg",)

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State]:
        """A step along the sign of one mean; the other is kept."""
        step, keep = self.betas
        direction = state["exp_avg"].lerp(gradient, 1 - step).sign()
        mean = state["exp_avg"].lerp(gradient, 1 - keep)
        return -lr * self._coupled(direction, params), {"exp_avg": mean}
