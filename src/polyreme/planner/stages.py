"""Which layers make a stage: contiguous cuts, by their longest stage or by the sum of all.

Cuts are given by their ends: (0, 3, 5) are two stages, of layers 0 to 2 and of layers 3 and 4.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def balanced(seconds: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Numbers of layers of each stage, such that the longest stage takes least; none is empty.

    >>> balanced([1.0] * 30, 4)
    (8, 8, 7, 7)
    """
    n = len(seconds)
    assert n >= n_stages, "each stage has a layer"
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    between = sums[None, :] - sums[:, None]  # [start, end]
    between[np.tril_indices(n + 1)] = np.inf
    ends = cut(np.broadcast_to(between[:n], (n_stages, n, n + 1)))
    assert ends is not None, "layers take finite time"
    return tuple(end - start for start, end in itertools.pairwise(ends))


def spans(each: Array, moved: Array | None = None) -> Array:
    """What layers from a start up to an end add up to on each stage (S, L, L + 1).

    `each` (S, L) is what a layer takes, `moved` (L - 1) or (S, L - 1) what goes from it to the
    next one in the same stage. Without a layer it is infinite.
    """
    n_stages, n = each.shape
    found = np.full((n_stages, n, n + 1), np.inf)
    for start in range(n):
        more = each[:, start:].copy()
        if moved is not None:
            more[:, 1:] += moved[..., start:]
        found[:, start, start + 1 :] = np.cumsum(more, axis=1)
    return found


def cut(costs: Array) -> tuple[int, ...] | None:
    """Ends of the stages whose most expensive one costs least; none where all cost infinitely.

    `costs` (S, L, L + 1) are by stage, start and end. Of equal ones it is that of the longest first
    stage, then of the longest second one, and so on.
    """
    n_stages, n = costs.shape[:2]
    rests = [costs[-1, :, n]]  # of the last stage by its start, of the last two, ...
    for stage in range(n_stages - 2, -1, -1):
        both = np.maximum(costs[stage, :, 1:n], rests[-1][None, 1:])
        rests.append(both.min(axis=1, initial=np.inf))
    if not np.isfinite(rests[-1][0]):
        return None
    ends = [0]
    for stage, rest in zip(range(n_stages - 1), reversed(rests[:-1]), strict=True):
        both = np.maximum(costs[stage, ends[-1], 1:n], rest[1:])
        ends.append(int(np.flatnonzero(both == both.min())[-1]) + 1)
    return (*ends, n)


def cheapest(
    times: Array, crossing: Array, limit: float
) -> tuple[float, tuple[int, ...], float] | None:
    """The least sum of stages and borders none of which exceeds `limit`, its ends, its longest.

    `times` (S, L, L + 1) are by stage, start and end, `crossing` (L - 1) by border. None where
    there is no such cut.
    """
    n_stages, n = times.shape[:2]
    over = np.where(crossing <= limit, crossing, np.inf)
    sums = np.where(times[0, 0] <= limit, times[0, 0], np.inf)  # by where it ends
    starts = np.zeros((n_stages, n + 1), dtype=np.int64)
    for stage in range(1, n_stages):
        before = sums[1:n] + over  # the stage begins at 1, 2, ...
        here = np.where(times[stage, 1:] <= limit, times[stage, 1:], np.inf)
        both = before[:, None] + here
        starts[stage] = both.argmin(axis=0) + 1
        sums = both.min(axis=0)
    total = float(sums[n])
    if not np.isfinite(total):
        return None
    ends = [n]
    for stage in range(n_stages - 1, 0, -1):
        ends.append(int(starts[stage, ends[-1]]))
    ends.append(0)
    ends.reverse()
    own = [times[stage, start, end] for stage, (start, end) in enumerate(itertools.pairwise(ends))]
    borders = [crossing[end - 1] for end in ends[1:-1]]
    return total, tuple(ends), float(max(own + borders))
