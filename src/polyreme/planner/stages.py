"""Which layers make a stage: as equal in time as contiguous cuts can be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


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
    longest = [between[:, n]]  # of one stage from there on, of two, ...
    for _ in range(n_stages - 1):
        longest.append(np.maximum(between, longest[-1][None, :]).min(axis=1))
    sizes, start = [], 0
    for left in range(n_stages - 1, 0, -1):
        both = np.maximum(between[start], longest[left - 1])
        end = int(np.flatnonzero(both == longest[left][start])[-1])
        sizes.append(end - start)
        start = end
    return (*sizes, n - start)
