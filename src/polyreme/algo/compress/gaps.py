"""Golomb codes of gaps between entries on accelerators: as `compress.golomb`, in few kernels.

Compiled by Triton, which torch brings along where there is one: import this only then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from . import picked

_TILE = 1024  # of indices


def split(where: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quotients in unary, packed, and remainders (int32), of indices in rising order, at least one.

    Waits for the device, which knows how long the quotients are.
    """
    k, device = where.numel(), where.device
    n_tiles = n_pieces(k, _TILE)
    rest = torch.empty(k, dtype=torch.int32, device=device)
    counts = torch.empty(n_tiles, dtype=torch.int64, device=device)
    _divide[n_tiles,](where, rest, counts, k, width, _TILE)
    ends = picked.summed(counts)
    n_bits = int(ends[-1])
    words = torch.full((n_bits // 32 + 1,), -1, dtype=torch.int32, device=device)
    _unary[n_tiles,](where, ends, words, k, n_tiles, width, _TILE)
    return words.view(torch.uint8)[: -(-n_bits // 8)], rest


def joined(unary: torch.Tensor, rest: torch.Tensor, width: int) -> torch.Tensor:
    """The indices that `split` was given, of remainders as int64, at least one."""
    k = rest.numel()
    ends = picked.of_mask(unary, 8 * unary.numel(), value=0).where(k)
    # All quotients up to one are as many as the ones among the bits up to its end.
    sums = rest.cumsum(0)
    _join[n_pieces(k, _TILE),](ends, sums, k, width, _TILE)
    return ends


@triton.jit
def _gap(where, at, k):  # type: ignore[no-untyped-def]
    here = tl.load(where + at, mask=at < k, other=0)
    before = tl.load(where + at - 1, mask=(at > 0) & (at < k), other=-1)
    return tl.where(at < k, here - before - 1, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(where, rest, counts, k, width: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    gap = _gap(where, at, k)
    tl.store(rest + at, (gap & ((1 << width) - 1)).to(tl.int32), mask=at < k)
    tl.store(counts + tl.program_id(0), tl.sum(tl.where(at < k, (gap >> width) + 1, 0)))


@triton.jit  # type: ignore[untyped-decorator]
def _unary(where, ends, words, k, n_tiles, width: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clears the bit that ends each quotient, and what is left of the last byte."""
    program = tl.program_id(0)
    at = program * tile + tl.arange(0, tile)
    own = tl.where(at < k, (_gap(where, at, k) >> width) + 1, 0)
    end = tl.load(ends + program) - tl.sum(own) + tl.cumsum(own, 0) - 1
    bit = tl.full([tile], 1, dtype=tl.int32) << (end & 31).to(tl.int32)
    tl.atomic_and(words + (end >> 5), ~bit, mask=at < k, sem="relaxed")
    if program == n_tiles - 1:
        total = tl.load(ends + program)
        one = total * 0 + 1
        left = ((one << (total & 31)) - 1).to(tl.int32)
        tl.atomic_and(words + (total >> 5), left, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _join(ends, sums, k, width: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    end = tl.load(ends + at, mask=at < k, other=0)
    rest = tl.load(sums + at, mask=at < k, other=0)
    tl.store(ends + at, ((end - at) << width) + rest + at, mask=at < k)
