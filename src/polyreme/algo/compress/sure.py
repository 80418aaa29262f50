"""Entries that VarianceBased is sure of, and what of them it sends, on accelerators.

Compiled by Triton, which torch brings along where there is one: import this only then. One pass
over entries and state marks the sure ones; after that only these are looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from .picked import WORDS, Counted, lowest, ones, summed

_ENTRIES = 1024
_FINEST = 7


class Sent(NamedTuple):
    """What a packet holds, and what is left."""

    top: torch.Tensor
    found: Counted
    residue: torch.Tensor
    squares: torch.Tensor


def sent(
    flat: torch.Tensor, residue: torch.Tensor, squares: torch.Tensor, alpha: float, decay: float
) -> Sent:
    """Of float32 vectors, at least one entry each. `top` is one number."""
    flat, n, device = flat.contiguous(), flat.numel(), flat.device
    n_tiles = n_pieces(n, 32 * WORDS)
    words = torch.empty(n_tiles * WORDS, dtype=torch.int32, device=device)
    tops = torch.empty(n_tiles, dtype=torch.float32, device=device)
    copied, after = torch.empty_like(flat), torch.empty_like(flat)
    given = flat, residue.contiguous(), squares.contiguous(), words, tops, copied, after
    _sure[n_tiles,](*given, n, float(alpha), float(decay), WORDS, num_warps=8)
    top = tops.amax(0, keepdim=True)
    power = torch.empty_like(top)
    counts = torch.empty(n_tiles, dtype=torch.int32, device=device)
    given = flat, words, top, power, counts, copied, after
    _send[n_tiles,](*given, WORDS, _FINEST, num_warps=8)
    return Sent(power, Counted(words, summed(counts), n), copied, after)


def codes(flat: torch.Tensor, sent: Sent, k: int) -> torch.Tensor:
    """Signs and exponents (uint8) of the k entries that are sent."""
    found = sent.found
    out = torch.empty(k, dtype=torch.uint8, device=flat.device)
    given = flat.contiguous(), found.words, found.ends, sent.top, out
    _codes[len(found.ends),](*given, k, WORDS, _FINEST)
    return out


def meant(top: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Values by their codes (int64)."""
    out = torch.empty(codes.numel(), dtype=top.dtype, device=codes.device)
    if codes.numel():
        _meant[n_pieces(codes.numel(), _ENTRIES),](top, codes, out, codes.numel(), _ENTRIES)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sure(  # type: ignore[no-untyped-def]
    x,
    residue,
    squares,
    words,
    tops,
    copied,
    after,
    n,
    alpha,
    decay,
    n_words: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * n_words + tl.arange(0, n_words)
    place = tl.arange(0, 32)
    at = word[:, None] * 32 + place[None, :]
    there = at < n
    entry = tl.load(x + at, mask=there, other=0.0)
    step = entry - tl.load(residue + at, mask=there, other=0.0)
    square = tl.load(squares + at, mask=there, other=0.0) + step * step
    size = tl.abs(entry)
    broken = entry != entry
    is_sure = (entry * entry > square * alpha) & (entry != 0) | broken | (size == float("inf"))
    is_sure = is_sure & there
    tl.store(copied + at, entry, mask=there)
    tl.store(after + at, square * decay, mask=there)
    tl.store(words + word, tl.sum(is_sure.to(tl.int32) << place[None, :], axis=1).to(tl.int32))
    largest = tl.max(tl.where(is_sure & (entry == entry), size, 0.0))
    any_broken = tl.max((broken & there).to(tl.int32)) > 0
    tl.store(tops + tl.program_id(0), tl.where(any_broken, float("nan"), largest))


@triton.jit
def _exponent(size):  # type: ignore[no-untyped-def]
    """Of the power of two at or below; far below all others for zero and what is not finite."""
    small = size < 1.1754943508222875e-38
    bits = tl.where(small, size * 16777216.0, size).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 - tl.where(small, 24, 0)
    return tl.where((size > 0) & (size < float("inf")), exponent, -1048576)


@triton.jit
def _power(top):  # type: ignore[no-untyped-def]
    """The power of two at or below; zero and what is not finite stay."""
    small = top < 1.1754943508222875e-38
    scaled = tl.where(small, top * 16777216.0, top)
    power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.where(small, power * 5.960464477539063e-08, power)
    return tl.where((top > 0) & (top < float("inf")), power, top)


@triton.jit
def _down(x, power):  # type: ignore[no-untyped-def]
    """Steps of two below the top; the nearer of two is above from three quarters of it on."""
    size = tl.abs(x)
    down = _exponent(power) - _exponent(size * 1.3333333333333333)
    finite = (size < float("inf")) & (power < float("inf"))
    return tl.where(finite, down, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _send(  # type: ignore[no-untyped-def]
    x,
    words,
    top,
    powers,
    counts,
    copied,
    after,
    n_words: tl.constexpr,
    finest: tl.constexpr,
):
    """Clears the bits of what has to wait; of all others leaves what a receiver does not see."""
    word = tl.program_id(0).to(tl.int64) * n_words + tl.arange(0, n_words)
    place = tl.arange(0, 32)
    at = word[:, None] * 32 + place[None, :]
    is_set = ((tl.load(words + word)[:, None] >> place[None, :]) & 1) == 1
    own = _power(tl.load(top + tl.zeros([n_words], tl.int32)))
    power = own[:, None] + tl.zeros([n_words, 32], tl.float32)
    entry = tl.load(x + at, mask=is_set, other=0.0)
    down = _down(entry, power)
    goes = is_set & (down <= finest)
    step = tl.full([n_words, 32], 1, dtype=tl.int32) << tl.maximum(tl.minimum(down, finest), 0)
    value = tl.div_rn(power, step.to(tl.float32))
    value = tl.where(entry < 0, -value, value)
    tl.store(copied + at, entry - value, mask=goes)
    tl.store(after + at, tl.zeros_like(entry), mask=goes)
    kept = tl.sum(goes.to(tl.int32) << place[None, :], axis=1).to(tl.int32)
    tl.store(words + word, kept)
    tl.store(counts + tl.program_id(0), tl.sum(ones(kept)))
    lane = tl.arange(0, n_words)
    tl.store(powers + lane, own, mask=(lane == 0) & (tl.program_id(0) == 0))


@triton.jit  # type: ignore[untyped-decorator]
def _codes(  # type: ignore[no-untyped-def]
    x,
    words,
    ends,
    powers,
    out,
    k,
    n_words: tl.constexpr,
    finest: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * n_words + tl.arange(0, n_words)
    bits = tl.load(words + word)
    power = tl.load(powers + tl.zeros([n_words], tl.int32))
    own = ones(bits)
    to = tl.load(ends + tl.program_id(0)) - tl.sum(own) + tl.cumsum(own, 0) - own
    for _ in range(tl.max(own)):
        is_set = bits != 0
        low = lowest(bits)
        entry = tl.load(x + word * 32 + ones(low - 1), mask=is_set, other=0.0)
        down = tl.maximum(tl.minimum(_down(entry, power), finest), 0)
        code = down | ((entry < 0).to(tl.int32) << 3)
        tl.store(out + to, code.to(tl.uint8), mask=is_set & (to < k))
        to += is_set.to(tl.int32)
        bits = bits ^ low


@triton.jit  # type: ignore[untyped-decorator]
def _meant(top, codes, out, k, entries: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    code = tl.load(codes + at, mask=at < k, other=0).to(tl.int32)
    step = tl.full([entries], 1, dtype=tl.int32) << (code & 7)
    power = tl.load(top)
    value = power / step.to(power.dtype)
    tl.store(out + at, tl.where(code >> 3 == 1, -value, value), mask=at < k)
