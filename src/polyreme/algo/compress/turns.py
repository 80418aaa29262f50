"""Random rotations of blocks on accelerators, as `compress.rotated` has them, in one pass.

Compiled by Triton, which torch brings along where there is one: import this only then. A block is
a square matrix between two small Hadamard matrices; the large one is the Kronecker product of both.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from .splitmix import hashed

SIDES = {256: 16, 1024: 32, 4096: 64}
"""Of blocks of so many entries; others are no squares, or more than a program holds."""

_WARPS = {256: 1, 1024: 1, 4096: 4}  # the fastest of 1, 2, 4 and 8 on one H200


def turned(flat: torch.Tensor, key: torch.Tensor, n: int, size: int, *, back: bool) -> torch.Tensor:
    """The first n of a vector with its signs changed, then times the Hadamard matrix of a block.

    All blocks are filled up with zeros. `back` is the other way round, and leaves the first n.
    """
    n_blocks = -(-n // size)
    out = torch.empty(n if back else n_blocks * size, dtype=torch.float32, device=flat.device)
    given = flat.contiguous(), key, out, n, 1 / math.sqrt(size)
    _turned[n_blocks,](*given, SIDES[size], back, num_warps=_WARPS[size])
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _signed(  # type: ignore[no-untyped-def]
    x,
    key,
    begin,
    side: tl.constexpr,
):
    """As `counted.signs`: a row's are bits of one number."""
    each = tl.arange(0, side)
    row = begin + each * side
    mixed = hashed((row >> 6) + tl.load(key)) >> (row & 63).to(tl.uint64)
    # Halves, as a number of 64 bits takes two registers for every entry.
    low, high = (mixed & 0xFFFFFFFF).to(tl.uint32), (mixed >> 32).to(tl.uint32)
    half = tl.where(each[None, :] < 32, low[:, None], high[:, None])
    minus = (half >> (each & 31).to(tl.uint32)[None, :]) & 1
    return tl.where(minus == 1, -x, x)


@triton.jit
def _parts(x):  # type: ignore[no-untyped-def]
    """Three bfloat16 whose sum is a float32: products of signs by these are exact."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    mid = rest.to(tl.bfloat16)
    return high, mid, (rest - mid.to(tl.float32)).to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    flat,
    key,
    out,
    n,
    scale,
    side: tl.constexpr,
    back: tl.constexpr,
):
    each = tl.arange(0, side)
    begin = tl.program_id(0).to(tl.int64) * side * side
    at = begin + each[:, None] * side + each[None, :]
    shared = each[:, None] & each[None, :]
    shared = shared ^ (shared >> 4)
    shared = shared ^ (shared >> 2)
    shared = shared ^ (shared >> 1)
    small = (1 - 2 * (shared & 1)).to(tl.bfloat16)
    if back:
        x = tl.load(flat + at)
    else:
        x = tl.load(flat + at, mask=at < n, other=0.0)
        x = _signed(x, key, begin, side)
    high, mid, low = _parts(x)
    whole = tl.dot(small, low)
    whole = tl.dot(small, mid, whole)
    whole = tl.dot(small, high, whole)
    high, mid, low = _parts(whole)
    whole = tl.dot(low, small)
    whole = tl.dot(mid, small, whole)
    whole = tl.dot(high, small, whole) * scale
    if back:
        whole = _signed(whole, key, begin, side)
        tl.store(out + at, whole, mask=at < n)
    else:
        tl.store(out + at, whole)
