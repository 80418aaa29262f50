"""Which entries of a vector are at or above a value, or have a bit set, on accelerators.

Compiled by Triton, which torch brings along where there is one: import this only then. One pass
over all entries makes a bit of each and counts those of every tile; where each tile's begin in the
whole follows, and then only the bits are read again, a thirty-second of what they were made of.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from .above import Size

MODES = {"value": 0, "magnitude": 1, "turned": 2}
WORDS = 128  # of a tile, 32 entries each
_SUMMED = 8192


class Counted(NamedTuple):
    """Bits of entries, and how many are set in each tile and all tiles before it."""

    words: torch.Tensor
    ends: torch.Tensor
    n_entries: int

    @property
    def n(self) -> int:
        """How many are set; waits for the device."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def where(self, n: int) -> torch.Tensor:
        """Indices (int64) in rising order of the first n; what stands beyond the last is open."""
        out = torch.empty(n, dtype=torch.int64, device=self.words.device)
        if n:
            _write[len(self.ends),](self.words, self.ends, out, n, WORDS)
        return out

    @property
    def mask(self) -> torch.Tensor:
        """The bits as bytes, lowest first, as `bits.pack` has them."""
        return self.words.view(torch.uint8)[: -(-self.n_entries // 8)]


def counted(flat: torch.Tensor, least: torch.Tensor, *, size: Size) -> Counted:
    """Of entries whose size is not below `least`; NaN is above all."""
    flat = flat.contiguous()
    n_tiles = n_pieces(flat.numel(), 32 * WORDS)
    words = torch.empty(n_tiles * WORDS, dtype=torch.int32, device=flat.device)
    counts = torch.empty(n_tiles, dtype=torch.int32, device=flat.device)
    if n_tiles:
        given = flat, least, words, counts, flat.numel(), MODES[size], is_wide(flat), WORDS
        _mark[n_tiles,](*given)
    return Counted(words, summed(counts), flat.numel())


def of_mask(octets: torch.Tensor, n_entries: int, *, value: int = 1) -> Counted:
    """Of entries whose bit, of bytes that `bits.pack` made, has that value."""
    n_tiles = n_pieces(n_entries, 32 * WORDS)
    words = torch.empty(n_tiles * WORDS, dtype=torch.int32, device=octets.device)
    counts = torch.empty(n_tiles, dtype=torch.int32, device=octets.device)
    if n_tiles:
        _read[n_tiles,](octets.contiguous(), words, counts, n_entries, value, WORDS)
    return Counted(words, summed(counts), n_entries)


def summed(counts: torch.Tensor) -> torch.Tensor:
    """Sums (int64) of each row's counts up to each, in one kernel where torch takes three."""
    out = torch.empty(counts.shape, dtype=torch.int64, device=counts.device)
    if counts.numel():
        n = counts.shape[-1]
        _sum[counts.numel() // n,](counts, out, n, _SUMMED, num_warps=16)
    return out


def is_wide(flat: torch.Tensor) -> bool:
    """Whether sizes are compared in float64: all others are exact in float32."""
    return flat.dtype == torch.float64


@triton.jit  # type: ignore[untyped-decorator]
def sized(x, mode: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """What counts of entries, in a dtype that holds all; NaN as infinity, no zero below another."""
    found = x.to(tl.float64) if wide else x.to(tl.float32)
    if mode == 1:
        found = tl.abs(found)
    if mode == 2:
        found = -found
    found = tl.where(found == 0, 0.0, found)
    return tl.where(found != found, float("inf"), found)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(counts, out, n, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * n
    before = tl.full([], 0, tl.int64)
    for start in range(0, n, tile):
        at = start + tl.arange(0, tile)
        count = tl.load(counts + first + at, mask=at < n, other=0).to(tl.int64)
        tl.store(out + first + at, before + tl.cumsum(count, 0), mask=at < n)
        before += tl.sum(count)


@triton.jit
def ones(word):  # type: ignore[no-untyped-def]
    """How many bits of each int32 are set."""
    pairs = (word & 0x55555555) + ((word >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return (halves + (halves >> 16)) & 63


@triton.jit
def lowest(word):  # type: ignore[no-untyped-def]
    """The lowest bit that is set of each int32, alone."""
    return word & -word


@triton.jit  # type: ignore[untyped-decorator]
def _mark(  # type: ignore[no-untyped-def]
    flat,
    least,
    words,
    counts,
    n,
    mode: tl.constexpr,
    wide: tl.constexpr,
    n_words: tl.constexpr,
):
    word = tl.program_id(0).to(tl.int64) * n_words + tl.arange(0, n_words)
    place = tl.arange(0, 32)
    at = word[:, None] * 32 + place[None, :]
    there = at < n
    x = tl.load(flat + at, mask=there, other=0)
    bound = tl.load(least)
    bound = bound.to(tl.float64) if wide else bound.to(tl.float32)
    reached = (sized(x, mode, wide) >= bound) & there
    bits = tl.sum(reached.to(tl.int32) << place[None, :], axis=1).to(tl.int32)
    tl.store(words + word, bits)
    tl.store(counts + tl.program_id(0), tl.sum(ones(bits)))


@triton.jit  # type: ignore[untyped-decorator]
def _read(octets, words, counts, n, value: tl.constexpr, n_words: tl.constexpr):  # type: ignore[no-untyped-def]
    word = tl.program_id(0).to(tl.int64) * n_words + tl.arange(0, n_words)
    bits = tl.zeros([n_words], dtype=tl.int32)
    for octet in tl.static_range(4):
        at = word * 4 + octet
        held = tl.load(octets + at, mask=at * 8 < n, other=0).to(tl.int32)
        bits = bits | (held << (8 * octet))
    if value == 0:
        bits = ~bits
    left = tl.minimum(tl.maximum(n - word * 32, 0), 32)
    one = tl.full([n_words], 1, dtype=tl.int64)
    bits = bits & ((one << left) - 1).to(tl.int32)
    tl.store(words + word, bits)
    tl.store(counts + tl.program_id(0), tl.sum(ones(bits)))


@triton.jit  # type: ignore[untyped-decorator]
def _write(words, ends, out, most, n_words: tl.constexpr):  # type: ignore[no-untyped-def]
    word = tl.program_id(0).to(tl.int64) * n_words + tl.arange(0, n_words)
    bits = tl.load(words + word)
    own = ones(bits)
    to = tl.load(ends + tl.program_id(0)) - tl.sum(own) + tl.cumsum(own, 0) - own
    for _ in range(tl.max(own)):
        low = lowest(bits)
        tl.store(out + to, word * 32 + ones(low - 1), mask=(bits != 0) & (to < most))
        to += (bits != 0).to(tl.int32)
        bits = bits ^ low
