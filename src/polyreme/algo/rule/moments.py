"""Running means of gradients and of their squares, with their bias taken out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .kind import Beta, Positive, RuleKind, State

if TYPE_CHECKING:
    import torch


class Moments(RuleKind, frozen=True, kw_only=True):
    """What Adam and its relations share. Source: Kingma and Ba 2015, algorithm 1.

    Attributes:
        betas: Decay of the mean of gradients, and of their squares.
        eps: Added to the root of the squares.
    """

    lr: Positive = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-8

    @property
    def keeps_momentum(self) -> bool:
        """Unless its share is 0."""
        return self.betas[0] > 0

    @property
    def vectors(self) -> tuple[str, ...]:
        """Both means."""
        return ("exp_avg", "exp_avg_sq")

    @property
    def counts(self) -> tuple[str, ...]:
        """Steps so far."""
        return ("step",)

    def _direction(self, gradient: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        step = state["step"] + 1
        first, second = self.betas
        mean = state["exp_avg"].lerp(gradient, 1 - first)
        squares = (state["exp_avg_sq"] * second).addcmul(gradient, gradient, value=1 - second)
        root = (squares / (1 - second**step)).sqrt().add(self.eps)
        direction = (mean / (1 - first**step)).div(root)
        return direction, {"exp_avg": mean, "exp_avg_sq": squares, "step": step}

    def _options(self, params: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Options of torch's optimizers."""
        # Only meta tensors and some backends have no fused kernel; torch then picks what it has.
        fused = all(param.device.type in _fused_devices() for param in params)
        return {
            "lr": self.lr,
            "betas": self.betas,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "fused": fused or None,
        }


def _fused_devices() -> list[str]:
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    return list(_get_fused_kernels_supported_devices())
