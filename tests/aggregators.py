"""Aggregators by their definitions, in float64 and numpy, one column or pair at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np

from polyreme.algo import aggregate
from polyreme.algo.aggregate.robust import RobustKind

MEMBERS: tuple[type[RobustKind], ...] = (
    aggregate.Krum,
    aggregate.MultiKrum,
    aggregate.CoordinateMedian,
    aggregate.TrimmedMean,
    aggregate.GeometricMedian,
    aggregate.CenteredClipping,
    aggregate.MinimumDiameterAveraging,
    aggregate.MoNNA,
    aggregate.MeanAroundMedian,
    aggregate.Bulyan,
)


def _apart(x: Any) -> Any:
    return np.array([[((a - b) ** 2).sum() for b in x] for a in x])


def _lowest(values: Any, k: int) -> list[int]:
    """Places of the k smallest, of equal ones the first."""
    return sorted(sorted(range(len(values)), key=lambda i: (values[i], i))[:k])


def _score(x: Any, neighbours: int) -> list[float]:
    squared = _apart(x)
    return [sum(sorted(np.delete(row, i))[: max(0, neighbours)]) for i, row in enumerate(squared)]


def krum(x: Any, f: int, more: int = 0) -> Any:
    return x[_lowest(_score(x, len(x) - f - 2 + more), 1)[0]]


def multi_krum(x: Any, f: int, more: int = 0) -> Any:
    return x[_lowest(_score(x, len(x) - f - 2 + more), len(x) - f)].mean(0)


def coordinate_median(x: Any, f: int) -> Any:
    return np.array([np.median(column) for column in x.T])


def trimmed_mean(x: Any, f: int) -> Any:
    return np.array([np.mean(sorted(column)[f : len(x) - f]) for column in x.T])


def mean_around_median(x: Any, f: int) -> Any:
    return _around(x, len(x) - f)


def _around(x: Any, keep: int) -> Any:
    return np.array(
        [column[_lowest(abs(column - np.median(column)), keep)].mean() for column in x.T]
    )


def bulyan(x: Any, f: int) -> Any:
    left = list(range(len(x)))
    while len(left) > 2 * f:
        scores = _score(x[left], max(1, len(left) - f - 2))
        others = [tuple(sorted(row)) for row in _apart(x[left])]
        left.pop(min(range(len(left)), key=lambda i: (scores[i], others[i], i)))
    chosen = [i for i in range(len(x)) if i not in left]
    return _around(x[chosen], len(chosen) - 2 * f)


def minimum_diameter_averaging(x: Any, f: int) -> Any:
    squared = _apart(x)
    every = combinations(range(len(x)), len(x) - f)
    best = min(every, key=lambda rows: squared[np.ix_(rows, rows)].max())
    return x[list(best)].mean(0)


def monna(x: Any, f: int, trusted: int = 0) -> Any:
    return x[_lowest(_apart(x)[trusted], len(x) - f)].mean(0)


def centered_clipping(
    x: Any, f: int, tau: float = 1.0, iterations: int = 1, centre: Any = 0
) -> Any:
    centre = centre + np.zeros_like(x[0])
    for _ in range(iterations):
        parts = []
        for row in x:
            length = np.sqrt(((row - centre) ** 2).sum())
            parts.append((row - centre) * (min(1.0, tau / length) if length else 1.0))
        centre = centre + np.mean(parts, axis=0)
    return centre


def nearest_neighbour_mixing(x: Any, f: int) -> Any:
    squared = _apart(x)
    return np.array([x[_lowest(row, len(x) - f)].mean(0) for row in squared])


def clipping(x: Any, c: float) -> Any:
    norms = np.sqrt((x**2).sum(1))
    return np.array([row * min(1.0, c / norm) for row, norm in zip(x, norms, strict=True)])


def arc(x: Any, f: int) -> Any:
    norms = np.sqrt((x**2).sum(1))
    n = len(x)
    clipped = int(np.floor(2 * f * (n - f) / n + 1e-12))
    return clipping(x, sorted(norms)[n - clipped - 1])


DEFINITIONS: dict[type[RobustKind], Callable[..., Any]] = {
    aggregate.Krum: krum,
    aggregate.MultiKrum: multi_krum,
    aggregate.CoordinateMedian: coordinate_median,
    aggregate.TrimmedMean: trimmed_mean,
    aggregate.CenteredClipping: centered_clipping,
    aggregate.MinimumDiameterAveraging: minimum_diameter_averaging,
    aggregate.MoNNA: monna,
    aggregate.MeanAroundMedian: mean_around_median,
    aggregate.Bulyan: bulyan,
}
"""Of all but the geometric median, which is what no other point is better than."""
