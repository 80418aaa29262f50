"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

if TYPE_CHECKING:
    import torch

_Beta = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class AdamW(msgspec.Struct, frozen=True, kw_only=True, tag="AdamW", tag_field="kind"):
    """Adam with decoupled weight decay. Source: Loshchilov and Hutter 2019, algorithm 2.

    Differs: the decay is scaled by the learning rate, as torch has it.

    Attributes:
        lr: Learning rate, before the schedule.
        betas: Decay of the mean of gradients, and of their squares.
        eps: Added to the root of the squares.
        weight_decay: Share of the weights, times the learning rate, taken off in each step.
    """

    lr: Annotated[float, msgspec.Meta(gt=0)] = 3e-4
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    eps: Annotated[float, msgspec.Meta(gt=0)] = 1e-8
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.01

    @property
    def n_states(self) -> int:
        """Tensors of a parameter's size kept per parameter."""
        return 2

    @property
    def n_scalars(self) -> int:
        """4-byte scalars kept per parameter tensor."""
        return 1  # the step count

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
