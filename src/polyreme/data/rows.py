"""Sparse rows: what a linear model reads, from file to gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy import sparse

_PARTS = ("indptr", "indices", "values")


@dataclass(frozen=True, kw_only=True)
class Rows:
    """N rows of `n_features` numbers, of which those that are not stored are 0 (CSR).

    Row i has the numbers ``values[indptr[i]:indptr[i + 1]]`` at the features ``indices[...]``,
    which ascend. `indptr` is int64 [N + 1], `indices` int32 [n_stored], `values` float64 or
    float32 [n_stored]. Arrays may be views of a file.
    """

    indptr: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    n_features: int

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @property
    def n_stored(self) -> int:
        """Numbers that are stored."""
        return int(self.indptr[-1] - self.indptr[0])

    @property
    def longest(self) -> int:
        """Most numbers of a row."""
        return int(np.diff(self.indptr).max(initial=0))

    def between(self, start: int, stop: int) -> Rows:
        """Rows from one to before another; no stored number is copied."""
        first, last = self.indptr[start], self.indptr[stop]
        return Rows(
            indptr=self.indptr[start : stop + 1] - first,
            indices=self.indices[first:last],
            values=self.values[first:last],
            n_features=self.n_features,
        )

    def take(self, which: np.ndarray) -> Rows:
        """The rows of these numbers, in this order; a range of them is not copied."""
        n = len(which)
        if (
            n
            and which[-1] - which[0] == n - 1
            and np.array_equal(which, np.arange(which[0], which[0] + n))
        ):
            return self.between(int(which[0]), int(which[0]) + n)
        starts = self.indptr[which]
        counts = self.indptr[which + 1] - starts
        indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        at = np.repeat(starts - indptr[:-1], counts) + np.arange(indptr[-1])
        return Rows(
            indptr=indptr,
            indices=self.indices[at],
            values=self.values[at],
            n_features=self.n_features,
        )

    def column(self, feature: int) -> np.ndarray:
        """A feature of all rows [N]."""
        found = np.zeros(len(self), self.values.dtype)
        at = np.flatnonzero(self.indices == feature)
        found[np.searchsorted(self.indptr, at, side="right") - 1] = self.values[at]
        return found

    def padded(self, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Features (int64) and values [N, width] of the numbers stored; 0 and 0 fill a row."""
        counts = np.diff(self.indptr)
        row = np.repeat(np.arange(len(self)), counts)
        place = np.arange(self.n_stored) - np.repeat(self.indptr[:-1], counts)
        indices = np.zeros((len(self), width), np.int64)
        values = np.zeros((len(self), width), self.values.dtype)
        indices[row, place], values[row, place] = self.indices, self.values
        return indices, values

    def dense(self) -> np.ndarray:
        """All numbers [N, n_features]."""
        whole = np.zeros((len(self), self.n_features), self.values.dtype)
        whole[np.repeat(np.arange(len(self)), np.diff(self.indptr)), self.indices] = self.values
        return whole

    def scipy(self) -> sparse.csr_matrix:
        """The same arrays as a matrix of scipy."""
        from scipy import sparse

        parts = (self.values, self.indices, self.indptr)
        return sparse.csr_matrix(parts, shape=(len(self), self.n_features))

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """Rows of the same features, one part after another; a single part is not copied."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(part.n_stored for part in parts)])
        ends = [part.indptr[1:] + at for part, at in zip(parts, starts, strict=False)]
        return Rows(
            indptr=np.concatenate([np.zeros(1, np.int64), *ends]),
            indices=np.concatenate([part.indices for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            n_features=parts[0].n_features,
        )

    @staticmethod
    def of(matrix: Any) -> Rows:
        """From a matrix of scipy, or an array [N, D]; features ascend in each row, each once."""
        from scipy import sparse

        own = sparse.csr_matrix(matrix)
        if not own.has_canonical_format:
            own = own.copy() if own is matrix else own
            own.sum_duplicates()
        values = own.data if own.data.dtype in (np.float32, np.float64) else own.data.astype(float)
        return Rows(
            indptr=own.indptr.astype(np.int64),
            indices=own.indices.astype(np.int32),
            values=values,
            n_features=own.shape[1],
        )

    def save(self, folder: Path) -> None:
        """Write the arrays, one file each, into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in _PARTS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        np.save(folder / "n_features.npy", np.int64(self.n_features))

    @staticmethod
    def open(folder: Path) -> Rows:
        """What was saved, read from the files as it is asked for."""
        parts = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _PARTS}
        return Rows(**parts, n_features=int(np.load(folder / "n_features.npy")))
