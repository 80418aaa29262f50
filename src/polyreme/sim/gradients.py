"""What computes the gradients of workers that are played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ..algo.effects import Computed

if TYPE_CHECKING:
    import torch


class Gradients(Protocol):
    """The gradients of a task."""

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch at these parameters."""


Together = Callable[[Sequence[tuple[int, "torch.Tensor", int]]], list[Computed]]
"""Gradients of several workers (rank, parameters, batch), in their order."""
