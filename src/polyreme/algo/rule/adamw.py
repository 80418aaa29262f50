"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .kind import NotNegative
from .moments import Moments

if TYPE_CHECKING:
    import torch

    from ..vector import Layout
    from .kind import State


class AdamW(Moments, frozen=True, kw_only=True, tag="AdamW", tag_field="kind"):
    """Adam with decoupled weight decay. Source: Loshchilov and Hutter 2019, algorithm 2.

    Differs: the decay is scaled by the learning rate, as torch has it.

    Attributes:
        lr: Learning rate, before the schedule.
        betas: Decay of the mean of gradients, and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Share of the weights, times the learning rate, taken off in each step.
    """

    weight_decay: NotNegative = 0.01

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State]:
        """Adam's step, and the decay."""
        direction, state = self._direction(gradient, state)
        return -lr * self._coupled(direction, params), state

    def native(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
        """That of torch."""
        import torch

        return torch.optim.AdamW(params, **self._options(params))
