"""Token arrays read as one sequence without being joined in memory.

Axes: N samples, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


class Joined:
    """One-dimensional arrays (memory maps too), one after another."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(array for array in arrays if len(array))
        lengths = [len(array) for array in self.arrays]
        self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def slice(self, first: int, stop: int) -> np.ndarray:
        """Tokens from `first` up to `stop`, as int64."""
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        pieces = []
        while first < stop:
            start = int(self._starts[at])
            piece = self.arrays[at][first - start : stop - start]
            pieces.append(piece)
            first += len(piece)
            at += 1
        return np.concatenate(pieces or [np.empty(0)]).astype(np.int64)

    def rows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Rows of `length` tokens (int64) that begin at `starts`."""
        if len(self.arrays) == 1:
            places = starts[:, None] + np.arange(length)
            return np.asarray(self.arrays[0][places]).astype(np.int64)
        rows = [self.slice(int(start), int(start) + length) for start in starts]
        return np.stack(rows) if rows else np.empty((0, length), dtype=np.int64)

    def cut(self, place: int) -> tuple[Joined, Joined]:
        """The tokens before `place` and those from there on, as views."""
        before, after = [], []
        for array, start in zip(self.arrays, self._starts, strict=False):
            inside = min(len(array), max(0, place - int(start)))
            before.append(array[:inside])
            after.append(array[inside:])
        return Joined(before), Joined(after)

    def chunks(self, n_tokens: int, chunk: int = 2**20) -> Iterator[np.ndarray]:
        """The first `n_tokens` tokens in chunks, as int64."""
        for first in range(0, n_tokens, chunk):
            yield self.slice(first, min(first + chunk, n_tokens))

    def pairs(self, n_pairs: int, chunk: int = 2**20) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The first `n_pairs` neighbours (token, next token) in chunks, as int64."""
        for first in range(0, n_pairs, chunk):
            tokens = self.slice(first, min(first + chunk, n_pairs) + 1)
            yield tokens[:-1], tokens[1:]
