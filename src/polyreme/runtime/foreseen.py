"""Updates that are asked for before the host knows the numbers of the step.

Else a device would have nothing to do from the end of its backward pass until the host has read
them and asked for the update. Fused optimizers of torch read on the device by what they divide
gradients, and whether they leave all as it was: made for loss scaling, it serves here for the
weight of the labels, clipping, and steps that are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """On the device: what gradients are divided by, and 1 where nothing may change (else 0)."""

    divisor: torch.Tensor
    skips: torch.Tensor

    @contextmanager
    def given_to(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The optimizer reads them in its steps."""
        given: Any = optimizer
        given.grad_scale, given.found_inf = self.divisor, self.skips
        try:
            yield
        finally:
            del given.grad_scale, given.found_inf


def can_be(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    """Whether all of them read such numbers."""
    return all(getattr(each, "_step_supports_amp_scaling", False) for each in optimizers)


def foreseen(
    vector: torch.Tensor, n_ranks: int, nominal_weight: float, clip_norm: float | None
) -> Foreseen:
    """By the end-of-step vector, of which the host will come to the same."""
    _, weight, square_sum = vector[:3]
    factor = nominal_weight / weight
    norm = square_sum.sqrt() * factor
    skips = (vector[3 : 3 + 2 * n_ranks : 2] > 0).any() | (weight == 0) | ~torch.isfinite(norm)
    if clip_norm is not None:
        factor = factor * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    divisor = torch.where(skips, 1.0, 1 / factor)
    return Foreseen(divisor=divisor.float(), skips=skips.float())
