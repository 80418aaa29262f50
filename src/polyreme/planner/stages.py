"""Which layers make a stage: as equal in time as contiguous cuts can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise


def balanced(seconds: Sequence[float], n_stages: int) -> tuple[int, ...]:
    """Numbers of layers of each stage, such that the longest stage takes least; none is empty.

    >>> balanced([1.0] * 30, 4)
    (8, 8, 7, 7)
    """
    n = len(seconds)
    assert n >= n_stages, "each stage has a layer"
    sums = [0.0, *accumulate(seconds)]

    @cache
    def best(start: int, left: int) -> tuple[float, int]:
        """(longest of the stages from here on, where the first of them ends)."""
        if left == 1:
            return sums[n] - sums[start], n
        found = [
            (max(sums[end] - sums[start], best(end, left - 1)[0]), -end)
            for end in range(start + 1, n - left + 2)
        ]
        longest, end = min(found)
        return longest, -end

    ends = [0]
    for left in range(n_stages, 0, -1):
        ends.append(best(ends[-1], left)[1])
    return tuple(end - start for start, end in pairwise(ends))
