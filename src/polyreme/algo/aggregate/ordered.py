"""What the order of the entries of each column says: medians, and means of those in the middle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .blocks import working

if TYPE_CHECKING:
    import torch


def sorted_columns(block: torch.Tensor) -> torch.Tensor:
    """Each column in ascending order."""
    return block.sort(dim=0).values


def median(ascending: torch.Tensor) -> torch.Tensor:
    """The middle of each column, of an even number the midpoint of the two in the middle."""
    n = len(ascending)
    low, high = ascending[(n - 1) // 2], ascending[n // 2]
    return low if n % 2 else low / 2 + high / 2


def trimmed(ascending: torch.Tensor, f: int) -> torch.Tensor:
    """The mean of each column without its f smallest and its f largest entries."""
    return ascending[f : len(ascending) - f].mean(0)


def nearest_mean(block: torch.Tensor, keep: int) -> torch.Tensor:
    """The mean of the entries of each column nearest to its median; ties to the lowest index."""
    import torch

    ascending = sorted_columns(block)
    away = (block - median(ascending)).abs_()
    if keep == len(block):
        return block.mean(0)
    limit = sorted_columns(away)[keep - 1]
    inside, tied = away < limit, away == limit
    left = keep - inside.sum(0)
    taken = inside | (tied & (tied.cumsum(0) <= left))
    return torch.where(taken, block, 0).sum(0) / keep


def weighted_median(block: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The entry of each column with half of the weight on either side, or the midpoint of two."""
    ascending, order = block.sort(dim=0, stable=True)
    reached = weights[order].cumsum(0)
    half = reached[-1] / 2
    low = (reached < half).sum(0, keepdim=True)
    high = (reached <= half).sum(0, keepdim=True).clamp_(max=len(block) - 1)
    return (ascending.gather(0, low) / 2 + ascending.gather(0, high) / 2)[0]


def finite_rows(block: torch.Tensor) -> torch.Tensor:
    """Which rows' entries are all finite."""
    import torch

    largest: torch.Tensor = torch.linalg.vector_norm(block, float("inf"), dim=1)
    return largest.isfinite()


def squared_from(block: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Squared distances of a block's rows from a vector, float64."""
    import torch

    away = block.to(working(block.dtype)) - out.to(working(block.dtype))
    norms: torch.Tensor = torch.linalg.vector_norm(away, dim=1)
    return norms.double().square()
