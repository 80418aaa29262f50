"""Products of matrices with thin ones, and where power iteration starts, on accelerators.

Compiled by Triton, which torch brings along where there is one: import this only then. Each is one
pass over the matrix, which is what it waits for; sums are in float32 and in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from .splitmix import hashed

MOST_COLUMNS = 4  # of thin matrices: each has sums of its own in registers
_ROWS, _COLUMNS = 16, 128
_DEEP = 256  # rows of one program, of those that add up


def applies(whole: torch.Tensor, thin: torch.Tensor) -> bool:
    """Whether there are products of such matrices."""
    fits = whole.dtype == torch.float32 and thin.shape[1] <= MOST_COLUMNS
    return fits and whole.numel() > 0 and whole.is_contiguous()


def times(whole: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """A (rows, columns) matrix times a (columns, rank) one."""
    (n_rows, n_columns), rank = whole.shape, thin.shape[1]
    out = whole.new_empty(n_rows, rank)
    given = whole, thin.contiguous(), out, n_rows, n_columns
    _times[n_pieces(n_rows, _ROWS),](*given, rank, _ROWS, _COLUMNS)
    return out


def turned_times(whole: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """The transpose of a (rows, columns) matrix times a (rows, rank) one."""
    (n_rows, n_columns), rank = whole.shape, thin.shape[1]
    grid = n_pieces(n_columns, _COLUMNS), n_pieces(n_rows, _DEEP)
    parts = whole.new_empty(grid[1], n_columns, rank)
    given = whole, thin.contiguous(), parts, n_rows, n_columns
    _turned_times[grid](*given, rank, _ROWS, _COLUMNS, _DEEP)
    return parts.sum(0)


def outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A (rows, rank) matrix times the transpose of a (columns, rank) one."""
    (n_rows, rank), n_columns = left.shape, len(right)
    out = left.new_empty(n_rows, n_columns)
    grid = n_pieces(n_columns, _COLUMNS), n_pieces(n_rows, _ROWS)
    given = left.contiguous(), right.contiguous(), out, n_rows, n_columns
    _outer[grid](*given, rank, _ROWS, _COLUMNS)
    return out


def directions(last: torch.Tensor, key: torch.Tensor, *, warm: bool) -> torch.Tensor:
    """Each column as it is, or drawn normal where it is zero or not finite, or unless `warm`."""
    n, rank = last.shape
    out = torch.empty_like(last, memory_format=torch.contiguous_format)
    given = last.contiguous(), key, out, n, float(warm)
    _directions[rank,](*given, rank, 1024)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _times(  # type: ignore[no-untyped-def]
    whole,
    thin,
    out,
    n_rows,
    n_columns,
    rank: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    first = tl.zeros([rows, columns], tl.float32)
    second, third, fourth = first, first, first
    for start in range(0, n_columns, columns):
        column = start + tl.arange(0, columns)
        there = (row < n_rows)[:, None] & (column < n_columns)[None, :]
        at = row.to(tl.int64)[:, None] * n_columns + column[None, :]
        x = tl.load(whole + at, mask=there, other=0.0)
        to, kept = thin + column * rank, column < n_columns
        first += x * tl.load(to, mask=kept, other=0.0)[None, :]
        if rank > 1:
            second += x * tl.load(to + 1, mask=kept, other=0.0)[None, :]
        if rank > 2:
            third += x * tl.load(to + 2, mask=kept, other=0.0)[None, :]
        if rank > 3:
            fourth += x * tl.load(to + 3, mask=kept, other=0.0)[None, :]
    to = out + row * rank
    tl.store(to, tl.sum(first, axis=1), mask=row < n_rows)
    if rank > 1:
        tl.store(to + 1, tl.sum(second, axis=1), mask=row < n_rows)
    if rank > 2:
        tl.store(to + 2, tl.sum(third, axis=1), mask=row < n_rows)
    if rank > 3:
        tl.store(to + 3, tl.sum(fourth, axis=1), mask=row < n_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _turned_times(  # type: ignore[no-untyped-def]
    whole,
    thin,
    parts,
    n_rows,
    n_columns,
    rank: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    deep: tl.constexpr,
):
    """Of a block of columns and some of the rows."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    first = tl.zeros([rows, columns], tl.float32)
    second, third, fourth = first, first, first
    for start in range(0, deep, rows):
        row = tl.program_id(1) * deep + start + tl.arange(0, rows)
        there = (row < n_rows)[:, None] & (column < n_columns)[None, :]
        at = row.to(tl.int64)[:, None] * n_columns + column[None, :]
        x = tl.load(whole + at, mask=there, other=0.0)
        to, kept = thin + row * rank, row < n_rows
        first += x * tl.load(to, mask=kept, other=0.0)[:, None]
        if rank > 1:
            second += x * tl.load(to + 1, mask=kept, other=0.0)[:, None]
        if rank > 2:
            third += x * tl.load(to + 2, mask=kept, other=0.0)[:, None]
        if rank > 3:
            fourth += x * tl.load(to + 3, mask=kept, other=0.0)[:, None]
    to = parts + (tl.program_id(1).to(tl.int64) * n_columns + column) * rank
    tl.store(to, tl.sum(first, axis=0), mask=column < n_columns)
    if rank > 1:
        tl.store(to + 1, tl.sum(second, axis=0), mask=column < n_columns)
    if rank > 2:
        tl.store(to + 2, tl.sum(third, axis=0), mask=column < n_columns)
    if rank > 3:
        tl.store(to + 3, tl.sum(fourth, axis=0), mask=column < n_columns)


@triton.jit  # type: ignore[untyped-decorator]
def _outer(  # type: ignore[no-untyped-def]
    left,
    right,
    out,
    n_rows,
    n_columns,
    rank: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    whole = tl.zeros([rows, columns], left.dtype.element_ty)
    for each in tl.static_range(rank):
        tall = tl.load(left + row * rank + each, mask=row < n_rows, other=0.0)
        wide = tl.load(right + column * rank + each, mask=column < n_columns, other=0.0)
        whole += tall[:, None] * wide[None, :]
    there = (row < n_rows)[:, None] & (column < n_columns)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * n_columns + column[None, :], whole, mask=there)


@triton.jit
def _uniform(key, at):  # type: ignore[no-untyped-def]
    """As `counted.uniform` of float64."""
    return (hashed(at + key) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit  # type: ignore[untyped-decorator]
def _directions(  # type: ignore[no-untyped-def]
    last,
    key,
    out,
    n,
    warm,
    rank: tl.constexpr,
    tile: tl.constexpr,
):
    column = tl.program_id(0)
    size = tl.zeros([tile], tl.float64)
    for start in range(0, n, tile):
        at = start + tl.arange(0, tile)
        x = tl.load(last + at * rank + column, mask=at < n, other=0.0)
        size += tl.abs(x.to(tl.float64))
    length = tl.sum(size) * warm
    usable = (length > 0) & (length < float("inf"))
    for start in range(0, n, tile):
        at = start + tl.arange(0, tile)
        place = at.to(tl.int64) * rank + column
        x = tl.load(last + place, mask=at < n, other=0.0)
        if not usable:
            held = tl.load(key)
            near = 1 - _uniform(held, place)
            turn = _uniform(held, place + n * rank)
            drawn = tl.sqrt(-2 * tl.log(near)) * tl.cos(turn * 6.283185307179586)
            x = drawn.to(x.dtype)
        tl.store(out + place, x, mask=at < n)
