"""Adam, with weight decay as a penalty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .moments import Moments

if TYPE_CHECKING:
    import torch

    from ..vector import Layout
    from .kind import State


class Adam(Moments, frozen=True, kw_only=True, tag="Adam", tag_field="kind"):
    """Adam; weight decay is coupled. Source: Kingma and Ba 2015, algorithm 1.

    Attributes:
        lr: Learning rate, before the schedule.
        betas: Decay of the mean of gradients, and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Added to the gradient, times the weights.
    """

    def update(
        self,
        gradient: torch.Tensor,
        state: State,
        params: torch.Tensor,
        *,
        lr: float,
        layout: Layout,
    ) -> tuple[torch.Tensor, State]:
        """A step along the mean over the root of the mean square."""
        direction, state = self._direction(self._coupled(gradient, params), state)
        return -lr * direction, state

    def native(self, params: Sequence[torch.Tensor]) -> torch.optim.Optimizer | None:
        """That of torch."""
        import torch

        return torch.optim.Adam(params, **self._options(params))
