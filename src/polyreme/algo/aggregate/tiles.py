"""Columns put in order on accelerators, in registers: a network of minima and maxima, unrolled.

Compiled by Triton, which torch brings along where there is one: import this only then. Its source
is written for a number of rows and an order, since Triton takes no lists of rows.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from .ordered import finite_rows, network

if TYPE_CHECKING:
    from .ordered import Order

_WIDTH = 128  # columns of a tile: one a thread
_TILES = 16  # of a program, which writes down what it saw of them once


def played(block: torch.Tensor, order: Order) -> tuple[torch.Tensor, torch.Tensor]:
    """What an order makes of (n, k) rows, float32 or float64, and what was seen of each row.

    That is (2, n), float64: whether it has entries that are not finite, and its squared distance
    from what is made, which says nothing where some row is not finite.
    """
    n, k = block.shape
    if block.stride(1) != 1:
        block = block.contiguous()
    out = torch.empty_like(block[0])
    n_programs = n_pieces(k, _WIDTH * _TILES)
    squared = block.new_empty(n_programs, n)
    kernel = _kernel(n, order.places.start, order.places.stop, order.keep)
    kernel[n_programs,](block, out, squared, k, block.stride(0), _WIDTH, _TILES, num_warps=4)
    seen = torch.zeros(2, n, dtype=torch.float64, device=block.device)
    seen[1] = squared.sum(0, dtype=torch.float64)
    if not seen[1].isfinite().all():  # else all entries are
        seen[0] = ~finite_rows(block)
    return out, seen


@cache
def _kernel(n: int, start: int, stop: int, keep: int | None) -> Any:
    """The kernel for so many rows, compiled when it is first played."""
    source = "\n".join(_lines(n, range(start, stop), keep)) + "\n"
    path = f"<columns of {n} in order, {start} to {stop}, {keep}>"
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path
    names: dict[str, Any] = {"tl": tl}
    exec(compile(source, path, "exec"), names)
    return triton.jit(names["columns"], do_not_specialize=["stride"])


def _lines(n: int, places: range, keep: int | None) -> Iterator[str]:
    """Its source: rows' entries are x0, x1, ..., in order y0, ..., off the median z0, ..."""
    yield "def columns(x, out, seen, k, stride, width: tl.constexpr, tiles: tl.constexpr):"
    yield "    first = tl.program_id(0).to(tl.int64) * (width * tiles)"
    yield "    stride = tl.cast(stride, tl.int64)"
    for i in range(n):
        yield f"    s{i} = tl.zeros([width], dtype=x.dtype.element_ty)"
    yield "    for tile in range(tiles):"
    yield "        at = first + tile * width + tl.arange(0, width)"
    yield "        there = at < k"
    for i in range(n):
        yield f"        x{i} = tl.load(x + {i} * stride + at, mask=there, other=0.0)"
        yield f"        y{i} = x{i}"
    yield from _ordered("y", n, places)
    if len(places) == 2:  # the midpoint is finite where they are
        yield f"        made = y{places[0]} * 0.5 + y{places[1]} * 0.5"
    else:
        total = " + ".join(f"y{i}" for i in places)
        yield f"        made = ({total}) / {len(places)}"
    if keep is not None:
        yield from _nearest(n, keep)
    yield "        tl.store(out + at, made, mask=there)"
    for i in range(n):
        yield f"        s{i} += tl.where(there, (x{i} - made) * (x{i} - made), 0.0)"
    yield f"    row = seen + tl.program_id(0).to(tl.int64) * {n}"
    for i in range(n):
        yield f"    tl.store(row + {i}, tl.sum(s{i}, axis=0))"


def _ordered(name: str, n: int, places: range) -> Iterator[str]:
    for low, high, has_low, has_high in network(n, places):
        a, b = f"{name}{low}", f"{name}{high}"
        if has_low and has_high:
            yield f"        smaller = tl.minimum({a}, {b})"
        if has_high:
            yield f"        {b} = tl.maximum({a}, {b})"
        if has_low:
            yield f"        {a} = " + ("smaller" if has_high else f"tl.minimum({a}, {b})")


def _nearest(n: int, keep: int) -> Iterator[str]:
    """The mean of those nearest to it: of those farthest off the first that there is room for."""
    for i in range(n):
        yield f"        z{i} = tl.abs(x{i} - made)"
    yield from _ordered("z", n, range(keep - 1, keep))
    yield f"        limit, room = z{keep - 1}, {keep} + tl.zeros([width], dtype=tl.int32)"
    for i in range(n):
        yield f"        room -= (tl.abs(x{i} - made) < limit).to(tl.int32)"
    yield "        total = tl.zeros([width], dtype=x.dtype.element_ty)"
    for i in range(n):
        yield f"        z = tl.abs(x{i} - made)"
        yield "        on = (z == limit) & (room > 0)"
        yield "        room -= on.to(tl.int32)"
        yield f"        total += tl.where(on | (z < limit), x{i}, 0.0)"
    yield f"        made = total / {keep}"
