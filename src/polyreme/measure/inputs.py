"""Random tensors that lie in memory as those do that layers get from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lying(
    shape: Sequence[int],
    strides: Sequence[int] | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Normal numbers of a shape; of `strides` their order counts, and which are 0.

    What is repeated along a dimension (stride 0) is held once: kernels read it faster than copies.
    """
    import torch

    if strides is None:
        return torch.randn(tuple(shape), dtype=dtype, device=device)
    order = sorted(range(len(shape)), key=lambda d: -strides[d])
    held = [1 if strides[d] == 0 else shape[d] for d in order]
    back = [order.index(d) for d in range(len(shape))]
    return torch.randn(held, dtype=dtype, device=device).permute(back).expand(tuple(shape))
