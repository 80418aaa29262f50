"""Distances between rows, from their dot products alone: the rows are read once, or twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..effects import Split, SumShards
from .blocks import Rows, on_host, working

if TYPE_CHECKING:
    import torch

    from .krum import Neighbours

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

_PART = 1 << 13  # entries whose products an accelerator adds up in their own type

# Squared distances that are this much smaller than squared norms are not had from dot products of
# that type to six digits: then dot products of differences to a row in their middle are taken.
_CLOSE_SINGLE, _CLOSE_DOUBLE = 0.25, 1e-8


@dataclass(frozen=True, kw_only=True)
class Points:
    """Rows, by the dot products of their differences to some point of space.

    `gram` (n + 2, n + 2) has the n rows, then a centre (the origin where there is none), then the
    origin. What is made of them is an affine sum of these, so that the point does not matter.
    `numbers` say whose the rows are.
    """

    gram: Array
    numbers: tuple[int, ...]

    @property
    def n(self) -> int:
        """Rows."""
        return len(self.gram) - 2

    @property
    def all_squared(self) -> Array:
        """Squared distances between all points."""
        return distances(self.gram)

    @property
    def squared(self) -> Array:
        """Squared distances between rows, (n, n)."""
        return self.all_squared[:-2, :-2]

    @property
    def norms(self) -> Array:
        """Norms of the rows."""
        found: Array = np.sqrt(self.all_squared[:-2, -1])
        return found

    def squared_from(self, weights: Array) -> Array:
        """Squared distances of the rows from a sum of points, (n + 2,) weights that sum to 1."""
        both = np.vstack([np.eye(self.n, self.n + 2), weights])
        found: Array = distances(both @ self.gram @ both.T)[-1, :-1]
        return found

    def mixed(self, weights: Array) -> Points:
        """The points that are sums of rows, centre and origin: weights are (m, n + 2)."""
        whole = np.vstack([weights, np.eye(self.n + 2)[-2:]])
        return Points(gram=whole @ self.gram @ whole.T, numbers=self.numbers)


def distances(gram: Array) -> Array:
    """Squared distances between points of these dot products; alike both ways: ties stay."""
    squares = np.diag(gram)
    found = np.maximum(squares[:, None] + squares[None, :] - 2 * gram, 0.0)
    np.fill_diagonal(found, 0.0)
    both: Array = (found + found.T) / 2
    return both


def affine(weights: Array) -> Array:
    """Weights (m, n) of rows as weights of rows, centre and origin, (m, n + 2), that sum to 1."""
    zero = np.zeros((len(weights), 1))
    return np.hstack([weights, zero, 1 - weights.sum(1, keepdims=True)])


def measured(rows: Rows, centre: torch.Tensor | None) -> Split[tuple[Points, list[int]]]:
    """The points, and which rows are finite: only these are points.

    A row counts as finite if its squared norm is, in float64.
    """
    import torch

    dtype = working(rows.like.dtype)
    gram = yield from _summed(rows, dtype, centre)
    if dtype != torch.float64 and not np.isfinite(np.diag(gram)).all():
        dtype = torch.float64
        gram = yield from _summed(rows, dtype, centre)
    finite = [i for i in range(rows.n) if np.isfinite(gram[i, i])]
    there = [*finite, rows.n, rows.n + 1]
    points = Points(gram=gram[np.ix_(there, there)], numbers=tuple(finite))
    if not finite:
        return points, finite
    middle = int(np.argmin(np.median(points.squared, axis=1)))
    close = _CLOSE_DOUBLE if dtype == torch.float64 else _CLOSE_SINGLE
    if np.median(points.squared[middle]) <= close * points.gram[middle, middle]:
        gram = yield from _summed(rows.taken(finite), torch.float64, centre, middle)
        points = Points(gram=gram, numbers=tuple(finite))
    return points, finite


def _summed(
    rows: Rows, dtype: torch.dtype, centre: torch.Tensor | None, about: int | None = None
) -> Split[Array]:
    """Dot products of rows, centre and origin over all shards; about a row, of differences to it.

    Where there is no centre the origin stands for it.
    """
    import torch

    n = rows.n
    like = rows.like
    total = torch.zeros(n + 2, n + 2, dtype=torch.float64, device=like.device)
    alone = centre is None and about is None and dtype == like.dtype
    for start, given in rows.blocks(at_once=alone and not on_host(like)):
        block = given.to(dtype)
        two = None
        if centre is not None or about is not None:
            two = block.new_zeros(2, block.shape[1])
        if centre is not None and two is not None:
            two[0] = centre[start : start + block.shape[1]]
        if about is not None and two is not None:
            two -= block[about]
            block = block - block[about]
        total[:n, :n] += block @ block.T if on_host(block) else _in_parts(block)
        if two is not None:
            total[:n, n:] += block @ two.T
            total[n:, n:] += two @ two.T
    total[n:, :n] = total[:n, n:].T
    found: Array = (yield SumShards(partial=total)).cpu().numpy()
    return found


def _in_parts(block: torch.Tensor) -> torch.Tensor:
    """Dot products of rows on an accelerator, those of so many entries each added up in float64.

    It sums a product of long rows in one type from the first entry to the last.
    """
    n_parts = block.shape[1] // _PART
    whole, rest = block[:, : n_parts * _PART], block[:, n_parts * _PART :]
    parts = whole.view(len(block), n_parts, _PART).transpose(0, 1)
    found: torch.Tensor = (parts @ parts.mT).double().sum(0) + rest @ rest.T
    return found


def nearest(squared: Array, k: int) -> Indices:
    """Which k distances are smallest, of equal ones those of the lowest index."""
    return np.argsort(squared, kind="stable")[:k]


def mean_of(indices: Indices, n: int) -> Array:
    """Weights (1, n + 2) of the mean of some of n rows."""
    weights = np.zeros((1, n + 2))
    weights[0, indices] = 1 / len(indices)
    return weights


def scores(squared: Array, f: int, neighbours: Neighbours) -> Array:
    """The sum of squared distances of each row to its nearest others, so many of them."""
    n = len(squared)
    count = n - f - (2 if neighbours == "n-f-2" else 1)
    others = squared + np.diag(np.full(n, np.inf))
    found: Array = np.sort(others, axis=1)[:, : min(count, n - 1)].sum(1)
    return found


def then(whole: Array, step: Array) -> Array:
    """Weights (k, n + 2) of rows, centre and origin, from those of what these were mixed to."""
    n = whole.shape[1] - 2
    mixed = np.vstack([whole, np.eye(n + 2)[-2:]])
    found: Array = step @ mixed
    return found
