"""What the order of the entries of each column says: medians, and means of those in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .blocks import on_host, working

if TYPE_CHECKING:
    import torch

    Played = Callable[[torch.Tensor, "Order"], tuple[torch.Tensor, torch.Tensor]]

_COMPILED = 1 << 20  # entries of a block: below, to compile takes longer than all else
_MOST_BY_NETWORK = 64  # rows: beyond, a sort of each column takes less than n log2(n)^2 / 4 steps


def ascending(block: torch.Tensor, wanted: range) -> list[torch.Tensor]:
    """The entries at these places of each column in ascending order, a vector a place.

    A network of minima and maxima of whole rows, which run at the speed of memory, where a sort
    of columns jumps from row to row.
    """
    import torch

    if not on_host(block):
        return list(_sorted(block, wanted).unbind(1))
    if len(block) > _MOST_BY_NETWORK:
        return list(block.sort(dim=0).values[wanted.start : wanted.stop])
    rows, spare = list(block.unbind(0)), [torch.empty_like(block[0])]
    own = [False] * len(rows)  # whether it may be written to: the block may not
    for low, high, has_low, has_high in network(len(block), wanted):
        a, b, smaller = rows[low], rows[high], None
        if has_low:
            smaller = torch.minimum(a, b, out=spare.pop() if spare else torch.empty_like(a))
        if has_high:
            rows[high] = torch.maximum(a, b, out=b if own[high] else torch.empty_like(b))
            own[high] = True
        if smaller is not None:
            if own[low]:
                spare.append(a)
            rows[low], own[low] = smaller, True
    return rows[wanted.start : wanted.stop]


@cache
def network(n: int, wanted: range) -> tuple[tuple[int, int, bool, bool], ...]:
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


@cache
def _in_tiles() -> Played | None:
    if find_spec("triton") is None:
        return None
    from .tiles import played

    return played


def _sorted(block: torch.Tensor, wanted: range) -> torch.Tensor:
    """Those places of each column, (k, places): elsewhere a sort of what lies together is one call.

    There a network is bound by memory, which it passes through for each of its pairs.
    """
    return block.T.contiguous().sort(dim=1).values[:, wanted.start : wanted.stop]


def middle(n: int) -> range:
    """Places of the one in the middle of n, or of the two."""
    return range((n - 1) // 2, n // 2 + 1)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is made of each column: a mean of the entries at these places of its ascending order.

    With `keep` it is the mean of as many entries, those nearest to that mean, which is the median;
    ties go to the lowest index.
    """

    places: range
    keep: int | None = None

    def compiled(self, n: int, like: torch.Tensor) -> Played | None:
        """The compiled form for n rows like that, which also says what it saw of each row.

        On the host it is there for blocks that take the time, elsewhere where Triton is.
        """
        if n > _MOST_BY_NETWORK:
            return None
        if not on_host(like):
            return _in_tiles()
        if n * like.numel() < _COMPILED:
            return None
        from .kernels import played

        return played

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """That, of (n, k) rows."""
        made = mean_of_places(block, self.places)
        return made if self.keep is None else _nearest_mean(block, made, self.keep)


def mean_of_places(block: torch.Tensor, places: range) -> torch.Tensor:
    """The mean of some places of the ascending order, of two the midpoint."""
    if not on_host(block) and len(places) > 2:
        return _sorted(block, places).mean(1)
    inner = ascending(block, places)
    if len(inner) == 2:
        return inner[0] / 2 + inner[1] / 2
    total = inner[0].clone()
    for row in inner[1:]:
        total += row
    return total / len(inner)


def _nearest_mean(block: torch.Tensor, point: torch.Tensor, keep: int) -> torch.Tensor:
    away = (block - point).abs_()
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

    dtype = working(block.dtype)
    point = out.to(dtype)
    if not on_host(block):
        return (block.to(dtype) - point).square_().sum(1).double()
    away = torch.empty_like(point)  # of one row, so that it stays in cache
    found = []
    for row in block:
        torch.sub(row.to(dtype), point, out=away)
        found.append(torch.dot(away, away))
    return torch.stack(found).double()
