"""Entries drawn without replacement on accelerators: as `compress.drawn`, with no sort.

Compiled by Triton, which torch brings along where there is one: import this only then. Numbers
that are drawn set bits, as many as are surely wanted; the few after these are looked at one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from . import picked
from .splitmix import hashed

MOST_LATE = 8192
_TILE = 1024
_LATE, _BEFORE = 64, 128


def chosen(key: torch.Tensor, n: int, k: int, n_sure: int, n_drawn: int) -> torch.Tensor:
    """Indices (int64) in rising order of the first k of n entries that differ among those drawn.

    Fewer than k do among the first `n_sure`, of which there is at least one, and at least k among
    all `n_drawn`; `MOST_LATE` at most are drawn late, after the sure ones.
    """
    device, n_late = key.device, n_drawn - n_sure
    words = torch.zeros(-(-n // 32), dtype=torch.int32, device=device)
    n_tiles = n_pieces(n_sure, _TILE)
    counts = torch.empty(n_tiles, dtype=torch.int32, device=device)
    _set[n_tiles,](key, words, counts, n_sure, n, _TILE)
    fresh = torch.empty(n_late, dtype=torch.int32, device=device)
    looked = key, words, fresh, n_sure, n_late, n
    _look[n_pieces(n_late, _LATE),](*looked, _LATE, _BEFORE)
    given = key, words, counts, fresh, n_tiles, n_sure, n_late, n, k
    _complete[1,](*given, 1 << (n_late - 1).bit_length(), _TILE, num_warps=8)
    octets = words.view(torch.uint8)[: -(-n // 8)]
    return picked.of_mask(octets, n).where(k)


@triton.jit
def _below(  # type: ignore[no-untyped-def]
    key,
    turn,
    n,
):
    """As `counted.below`."""
    mixed = hashed(turn.to(tl.int64) + tl.load(key))
    return ((mixed >> 1) & ((1 << 62) - 1)).to(tl.int64) % n


@triton.jit  # type: ignore[untyped-decorator]
def _set(  # type: ignore[no-untyped-def]
    key,
    words,
    counts,
    n_sure,
    n,
    tile: tl.constexpr,
):
    """Sets bits; counts those that were not set."""
    turn = tl.program_id(0) * tile + tl.arange(0, tile)
    place = _below(key, turn, n)
    at = (place & 31).to(tl.int32)
    bit = tl.full([tile], 1, dtype=tl.int32) << at
    there = turn < n_sure
    held = tl.atomic_or(words + (place >> 5), bit, mask=there, sem="relaxed")
    new = (((held >> at) & 1) == 0) & there
    tl.store(counts + tl.program_id(0), tl.sum(new.to(tl.int32)))


@triton.jit  # type: ignore[untyped-decorator]
def _look(  # type: ignore[no-untyped-def]
    key,
    words,
    fresh,
    n_sure,
    n_late,
    n,
    late: tl.constexpr,
    before: tl.constexpr,
):
    """Whether late ones are neither among the sure ones nor among the late ones before them."""
    turn = tl.program_id(0) * late + tl.arange(0, late)
    place = _below(key, n_sure + turn, n)
    word = tl.load(words + (place >> 5), mask=turn < n_late, other=0)
    seen = (word >> (place & 31).to(tl.int32)) & 1
    for start in range(0, (tl.program_id(0) + 1) * late, before):
        earlier = start + tl.arange(0, before)
        other = _below(key, n_sure + earlier, n)
        same = (place[:, None] == other[None, :]) & (earlier[None, :] < turn[:, None])
        seen = seen | tl.max(same.to(tl.int32), axis=1)
    tl.store(fresh + turn, 1 - seen, mask=turn < n_late)


@triton.jit  # type: ignore[untyped-decorator]
def _complete(  # type: ignore[no-untyped-def]
    key,
    words,
    counts,
    fresh,
    n_tiles,
    n_sure,
    n_late,
    n,
    k,
    wide: tl.constexpr,
    tile: tl.constexpr,
):
    """Sets the bits of as many late ones as are still wanted."""
    found = tl.zeros([tile], dtype=tl.int32)
    for start in range(0, n_tiles, tile):
        at = start + tl.arange(0, tile)
        found += tl.load(counts + at, mask=at < n_tiles, other=0)
    wanted = k - tl.sum(found)
    turn = tl.arange(0, wide)
    new = tl.load(fresh + turn, mask=turn < n_late, other=0)
    kept = (new == 1) & (tl.cumsum(new, 0) <= wanted)
    place = _below(key, n_sure + turn, n)
    bit = tl.full([wide], 1, dtype=tl.int32) << (place & 31).to(tl.int32)
    tl.atomic_or(words + (place >> 5), bit, mask=kept, sem="relaxed")
