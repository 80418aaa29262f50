"""Lengths of vectors that may be split over devices, and steps scaled by them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .effects import SumShards

if TYPE_CHECKING:
    import torch

    from .effects import Split
    from .vector import Layout


def length(vector: torch.Tensor) -> Split[float]:
    """Euclidean norm over all parts of the replica."""
    import torch

    own = torch.linalg.vector_norm(vector, dtype=torch.float64).square()
    total = yield SumShards(partial=own)
    return math.sqrt(float(total))


def normalised(vector: torch.Tensor) -> Split[torch.Tensor]:
    """The vector at length 1; zero stays zero, and one that is not finite is so in all entries.

    The host does not wait for the norm.
    """
    import torch

    own = torch.linalg.vector_norm(vector, dtype=torch.float64).square()
    norm = (yield SumShards(partial=own)).sqrt()
    norm = torch.where(norm != 0, norm, 1.0)
    # The norm may be beyond the vector's type: a power of two near its root is taken out first.
    # Of an infinite norm what is left is NaN.
    root = norm.log2().div(2).floor().exp2()
    return vector.div(root).div_(norm / root)


def trusted(
    step: torch.Tensor, params: torch.Tensor, layout: Layout, trust: float
) -> Split[torch.Tensor]:
    """Each tensor of the step times trust |w| / |step|, or 1 where either is zero."""
    import torch

    squares = torch.stack([layout.square_sums(params), layout.square_sums(step)])
    weights, steps = (yield SumShards(partial=squares, per_tensor=True)).sqrt()
    usable = (weights != 0) & (steps != 0)
    ratios = torch.where(usable, trust * weights / steps, torch.ones_like(steps))
    return step * layout.spread(ratios).to(step.dtype)
