"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable
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

    def optimizer(self, params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        """The native optimizer over these (local master) parameters."""
        import torch

        held = list(params)
        # Only meta tensors and some backends have no fused kernel; torch then picks what it has.
        fused = all(param.device.type in _fused_devices() for param in held)
        return torch.optim.AdamW(
            held,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=fused or None,
        )


def _fused_devices() -> list[str]:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return list(_get_fused_kernels_supported_devices())
