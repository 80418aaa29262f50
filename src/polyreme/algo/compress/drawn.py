"""Entries drawn without replacement by a key, without all of them in a row."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .. import bits, counted
from ..fused import applies, fused

if TYPE_CHECKING:
    import torch

_FEW = 1 << 12
_SIGMAS = 12


def chosen(key: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Indices in rising order of k of n entries, any k of them as likely as any others.

    They are the first k that differ of numbers that are drawn one by one, or those of least
    random numbers, where they are few or a large share. No step waits for the device.
    """
    import torch

    if n <= _FEW or 4 * k > n:
        return counted.hashed(key, n).argsort(stable=True)[:k].sort().values
    n_drawn = _draws(n, k)
    lots = bits.compiled(key, "lots")
    if lots is not None:
        n_sure = _sure(n, k)
        if n_sure and n_drawn - n_sure <= lots.MOST_LATE:
            found: torch.Tensor = lots.chosen(key, n, k, n_sure, n_drawn)
            return found
    below = fused(counted.below) if applies(key) else counted.below
    drawn = below(key, n_drawn, n)
    place, turn = (drawn.int() if n < 1 << 31 else drawn).sort(stable=True)
    new = torch.ones_like(place, dtype=torch.bool)
    torch.ne(place[1:], place[:-1], out=new[1:])
    rank = torch.empty_like(turn).scatter_(0, turn, new.long()).cumsum(0)
    kept = new & (rank[turn] <= k)
    at = torch.where(kept, kept.cumsum(0) - 1, k)
    return place.new_zeros(k + 1).scatter_(0, at, place)[:k].long()


def _draws(n: int, k: int) -> int:
    """So many that fewer than k differ in no run that anybody sees: by 12 standard deviations."""
    mean, deviation = _spread(n, k)
    return math.ceil(mean + _SIGMAS * deviation) + 32


def _sure(n: int, k: int) -> int:
    """So few that k differ in no run that anybody sees; 0, if there are none."""
    mean, deviation = _spread(n, k)
    return max(0, math.floor(mean - _SIGMAS * deviation) - 32)


def _spread(n: int, k: int) -> tuple[float, float]:
    """How many it takes until k of n differ: mean and standard deviation."""
    left = -math.log1p(-k / n)
    return n * left, math.sqrt(max(0.0, n * (k / (n - k) - left)))
