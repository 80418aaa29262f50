"""Columns put in order on the host, a tile of them in cache at a time: compiled, so slow to import.

Compiled code is not kept in files: where this is installed may not be written to.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from .ordered import network

if TYPE_CHECKING:
    import torch

    from .geometry import Array
    from .ordered import Order

_TILE = 2048  # columns that are read at a time: whole pages of each row
_WIDTH = 256  # columns that are put in order at a time: 32 rows of them are in the first cache
_LEAST = 1 << 15  # columns that are worth a thread


def played(block: torch.Tensor, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """What an order makes of (n, k) rows, float32 or float64, and what was seen of each row.

    That is (2, n), float64: whether it has entries that are not finite, and its squared distance
    from what is made, which says nothing where some row is not finite.
    """
    import torch

    n, k = block.shape
    x = block.numpy()
    out, pairs = torch.empty_like(block[0]), _pairs(n, order.places)
    limits = pairs[:0] if order.keep is None else _pairs(n, range(order.keep - 1, order.keep))
    keep = order.keep or 0
    threads = max(1, min(torch.get_num_threads(), k // _LEAST))
    starts = [k * part // threads for part in range(threads + 1)]
    places = (order.places.start, order.places.stop)
    play = partial(_part, x, out.numpy(), places, keep, pairs, limits)
    if threads == 1:
        seen = [play((0, k))]
    else:
        with ThreadPoolExecutor(threads) as pool:
            seen = list(pool.map(play, pairwise(starts)))
    return out, torch.from_numpy(np.sum(seen, axis=0))


def _pairs(n: int, wanted: range) -> Any:
    found = [(low, high) for low, high, _, _ in network(n, wanted)]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _part(
    x: Any,
    out: Any,
    places: tuple[int, int],
    keep: int,
    pairs: Any,
    limits: Any,
    span: tuple[int, int],
) -> Array:
    seen = np.zeros((2, len(x)))
    _columns(x, out, places, keep, pairs, limits, span, seen)
    return seen


@numba.njit(nogil=True)
def _columns(x, out, places, keep, pairs, limits, span, seen):  # type: ignore[no-untyped-def]
    n = len(x)
    tile = np.empty((_TILE // _WIDTH, n, _WIDTH), x.dtype)
    work, away = np.empty((n, _WIDTH), x.dtype), np.empty((n, _WIDTH), x.dtype)
    result, room = np.empty(_WIDTH, x.dtype), np.empty(_WIDTH, x.dtype)
    for start in range(span[0], span[1], _TILE):
        stop = min(start + _TILE, span[1])
        for i in range(n):
            for part in range((stop - start + _WIDTH - 1) // _WIDTH):
                first = start + part * _WIDTH
                for j in range(min(_WIDTH, stop - first)):
                    tile[part, i, j] = x[i, first + j]
        for part in range((stop - start + _WIDTH - 1) // _WIDTH):
            first = start + part * _WIDTH
            width = min(_WIDTH, stop - first)
            rows = tile[part]
            work[:] = rows
            _in_order(work, pairs, width)
            _mean(work, places[0], places[1], result, width)
            if keep:
                for i in range(n):
                    for j in range(width):
                        away[i, j] = abs(rows[i, j] - result[j])
                work[:] = away
                _in_order(work, limits, width)
                _nearest(rows, away, work[keep - 1], keep, result, room, width)
            out[first : first + width] = result[:width]
            for i in range(n):
                squared = _squared(rows[i], result, width)
                seen[1, i] += squared
                if not np.isfinite(squared):  # else all entries are
                    seen[0, i] += not np.isfinite(rows[i, :width]).all()


@numba.njit(nogil=True)
def _in_order(work, pairs, width):  # type: ignore[no-untyped-def]
    for pair in range(len(pairs)):
        low, high = work[pairs[pair, 0]], work[pairs[pair, 1]]
        for j in range(width):
            a, b = low[j], high[j]
            low[j] = a if a < b else b
            high[j] = b if a < b else a


@numba.njit(nogil=True)
def _mean(work, start, stop, result, width):  # type: ignore[no-untyped-def]
    """Of two the midpoint, which is finite where they are."""
    if stop - start == 2:
        half = work.dtype.type(0.5)
        for j in range(width):
            result[j] = work[start, j] * half + work[start + 1, j] * half
        return
    result[:width] = work[start, :width]
    for i in range(start + 1, stop):
        for j in range(width):
            result[j] += work[i, j]
    if stop - start > 1:
        count = work.dtype.type(stop - start)
        for j in range(width):
            result[j] /= count


@numba.njit(nogil=True)
def _nearest(rows, away, limit, keep, result, room, width):  # type: ignore[no-untyped-def]
    """The mean of those within the limit, and of those on it the first that there is room for."""
    one, none = rows.dtype.type(1), rows.dtype.type(0)
    result[:] = none
    room[:] = rows.dtype.type(keep)
    for i in range(len(rows)):
        for j in range(width):
            room[j] -= one if away[i, j] < limit[j] else none
    for i in range(len(rows)):
        for j in range(width):
            on = away[i, j] == limit[j] and room[j] > none
            room[j] -= one if on else none
            result[j] += rows[i, j] if on or away[i, j] < limit[j] else none
    count = rows.dtype.type(keep)
    for j in range(width):
        result[j] /= count


@numba.njit(nogil=True, fastmath={"reassoc"})
def _squared(row, point, width):  # type: ignore[no-untyped-def]
    squared = row.dtype.type(0)
    for j in range(width):
        squared += (row[j] - point[j]) * (row[j] - point[j])
    return squared
