"""Passes over many images at once, which other threads do not wait for.

Axes: N images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

_Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Whole pixels [N] down and right, edges repeated; whether [N] mirrored left to right then."""

    down: np.ndarray
    right: np.ndarray
    mirrored: np.ndarray


def moved(images_NCHW: np.ndarray, moves: Moves) -> np.ndarray:
    """The images, each moved."""
    out = np.empty(images_NCHW.shape, dtype=images_NCHW.dtype)
    _move(images_NCHW, moves.down, moves.right, moves.mirrored, out)
    return out


def taken(
    images_NCHW: np.ndarray, indices_N: np.ndarray, levels: np.ndarray, moves: Moves | None = None
) -> np.ndarray:
    """Images (uint8, in any layout) of these indices, moved, each byte as its level [256]."""
    n = len(images_NCHW)
    if len(indices_N) and not -n <= indices_N.min() <= indices_N.max() < n:
        raise IndexError(f"{indices_N} of {n} images")
    out = np.empty((len(indices_N), *images_NCHW.shape[1:]), dtype=levels.dtype)
    none = np.zeros(len(indices_N), dtype=np.int64)
    moves = moves or Moves(down=none, right=none, mirrored=none > 0)
    _take(images_NCHW, indices_N, levels, moves.down, moves.right, moves.mirrored, out)
    return out


@numba.njit(inline="always", cache=True, nogil=True)
def _sources(columns_W: _Array, right: int, mirrored: bool) -> None:
    """From which column each comes."""
    last = len(columns_W) - 1
    for w in range(last + 1):
        columns_W[w] = min(max((last - w if mirrored else w) - right, 0), last)


@numba.njit(cache=True, nogil=True)
def _move(images: _Array, down: _Array, right: _Array, mirrored: _Array, out: _Array) -> None:
    columns, last = np.empty(out.shape[3], dtype=np.int64), out.shape[2] - 1
    for n in range(out.shape[0]):
        _sources(columns, right[n], mirrored[n])
        for c in range(out.shape[1]):
            for h in range(out.shape[2]):
                row = images[n, c, min(max(h - down[n], 0), last)]
                for w in range(out.shape[3]):
                    out[n, c, h, w] = row[columns[w]]


@numba.njit(cache=True, nogil=True)
def _take(
    images: _Array,
    indices: _Array,
    levels: _Array,
    down: _Array,
    right: _Array,
    mirrored: _Array,
    out: _Array,
) -> None:
    columns, last = np.empty(out.shape[3], dtype=np.int64), out.shape[2] - 1
    for n in range(out.shape[0]):
        _sources(columns, right[n], mirrored[n])
        for c in range(out.shape[1]):
            for h in range(out.shape[2]):
                row = images[indices[n], c, min(max(h - down[n], 0), last)]
                for w in range(out.shape[3]):
                    out[n, c, h, w] = levels[row[columns[w]]]
