"""The largest entries above a threshold that a sample gives."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .above import reaching
from .sparsifier import count

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_SHARE, _LOWER, _UPPER, _TRIES = 0.01, 0.8, 1.3, 10


def largest_by_sample(flat: torch.Tensor, ratio: float, draw: Draw) -> torch.Tensor:
    """Indices in rising order of at most `count` of the largest by magnitude; the first of more.

    Source: Lin et al. 2018, section 5, and the authors' code: the threshold of every so many-th
    entry from a drawn first one on is moved by a factor of 1.3 or 0.8, at most ten times, until
    the entries at or above it are 0.8 to 1.3 times as many as wanted.
    Differs: `count` rounds down where the code rounds up.
    """
    import torch

    n, k = flat.numel(), count(ratio, flat.numel())
    if not n:
        return flat.new_zeros(0).long()
    step = stride(n, ratio)
    first = int(torch.randint(step, (), generator=draw.own()))
    sample = flat[first::step].abs().nan_to_num(nan=math.inf, posinf=math.inf)
    wanted = min(sample.numel(), math.ceil(n // step * ratio))
    threshold = sample.topk(wanted, sorted=False).values.min()
    found = reaching(flat, threshold, size="magnitude")
    for _ in range(_TRIES if step > 1 else 0):
        n_found = found.n
        if _LOWER * k <= n_found <= _UPPER * k:
            break
        threshold = threshold * (_UPPER if n_found > k else _LOWER)
        found = reaching(flat, threshold, size="magnitude")
    return found.where(min(k, found.n))


def stride(n_entries: int, ratio: float) -> int:
    """Every so many-th entry is in the sample: about 1 %, and enough to hold two large ones."""
    wanted = max(math.ceil(n_entries * _SHARE), math.ceil(2 / ratio))
    if n_entries <= math.ceil(2 / ratio):
        return 1
    step = math.ceil(n_entries / wanted / 32) * 32 + 1
    while n_entries // step < wanted:
        step -= 8
    return max(step, 1)
