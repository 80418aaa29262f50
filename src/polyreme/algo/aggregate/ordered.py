"""What the order of the entries of each column says: medians, and means of those in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from .blocks import working

if TYPE_CHECKING:
    import torch

_MOST_BY_NETWORK = 64  # rows: beyond, a sort of each column takes less than n log2(n)^2 / 4 steps


def ascending(block: torch.Tensor, wanted: range) -> list[torch.Tensor]:
    """The entries at these places of each column in ascending order, a vector a place.

    A network of minima and maxima of whole rows, which run at the speed of memory, where a sort
    of columns jumps from row to row.
    """
    import torch

    if len(block) > _MOST_BY_NETWORK:
        return list(block.sort(dim=0).values[wanted.start : wanted.stop])
    if len(block) == 1:
        return [block[0]]
    rows, spare = list(block.clone().unbind(0)), torch.empty_like(block[0])
    for low, high, has_low, has_high in _network(len(block), wanted):
        if has_low:
            torch.minimum(rows[low], rows[high], out=spare)
        if has_high:
            torch.maximum(rows[low], rows[high], out=rows[high])
        if has_low:
            rows[low], spare = spare, rows[low]
    return rows[wanted.start : wanted.stop]


@cache
def _network(n: int, wanted: range) -> tuple[tuple[int, int, bool, bool], ...]:
    """Pairs of rows to be ordered, and which of the two is looked at again.

    Source: Batcher 1968, "Sorting Networks and Their Applications", odd-even merge, without what
    the wanted places do not depend on.
    """
    needed, found = set(wanted), []
    for low, high in reversed(list(_pairs(n))):
        if low in needed or high in needed:
            found.append((low, high, low in needed, high in needed))
            needed |= {low, high}
    return tuple(reversed(found))


def _pairs(n: int) -> Iterator[tuple[int, int]]:
    width = 1
    while width < n:
        apart = width
        while apart:
            for start in range(apart % width, n - apart, 2 * apart):
                for low in range(start, min(start + apart, n - apart)):
                    if low // (2 * width) == (low + apart) // (2 * width):
                        yield low, low + apart
            apart //= 2
        width *= 2


def median(block: torch.Tensor) -> torch.Tensor:
    """The middle of each column, of an even number the midpoint of the two in the middle."""
    n = len(block)
    middle = ascending(block, range((n - 1) // 2, n // 2 + 1))
    return middle[0] if n % 2 else middle[0] / 2 + middle[1] / 2


def trimmed(block: torch.Tensor, f: int) -> torch.Tensor:
    """The mean of each column without its f smallest and its f largest entries."""
    inner = ascending(block, range(f, len(block) - f))
    total = inner[0].clone()
    for row in inner[1:]:
        total += row
    return total / len(inner)


def nearest_mean(block: torch.Tensor, keep: int) -> torch.Tensor:
    """The mean of the entries of each column nearest to its median; ties to the lowest index."""
    if keep == len(block):
        return block.mean(0)
    away = (block - median(block)).abs_()
    (limit,) = ascending(away, range(keep - 1, keep))
    near = (away <= limit).to(block.dtype)
    count = near.sum(0)
    out = near.mul_(block).sum(0) / keep
    tied = (count != keep).nonzero()[:, 0]
    if len(tied):
        out[tied] = _first_of_ties(block[:, tied], away[:, tied], limit[tied], keep)
    return out


def _first_of_ties(
    block: torch.Tensor, away: torch.Tensor, limit: torch.Tensor, keep: int
) -> torch.Tensor:
    """Where more are within the limit than are kept: of those on it the first."""
    import torch

    inside, on = away < limit, away == limit
    taken = inside | (on & (on.cumsum(0) <= keep - inside.sum(0)))
    return torch.where(taken, block, 0).sum(0) / keep


def weighted_median(block: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The entry of each column with half of the weight on either side, or the midpoint of two."""
    ordered, order = block.sort(dim=0, stable=True)
    reached = weights[order].cumsum(0)
    half = reached[-1] / 2
    low = (reached < half).sum(0, keepdim=True)
    high = (reached <= half).sum(0, keepdim=True).clamp_(max=len(block) - 1)
    return (ordered.gather(0, low) / 2 + ordered.gather(0, high) / 2)[0]


def finite_rows(block: torch.Tensor) -> torch.Tensor:
    """Which rows' entries are all finite."""
    sums = block @ block.new_ones(block.shape[1])
    if sums.isfinite().all():
        return sums.isfinite()
    return block.isfinite().all(1)  # a sum may pass the largest number where no entry does


def squared_from(block: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Squared distances of a block's rows from a vector, float64."""
    import torch

    away = block.to(working(block.dtype)) - out.to(working(block.dtype))
    return torch.bmm(away[:, None, :], away[:, :, None])[:, 0, 0].double()
