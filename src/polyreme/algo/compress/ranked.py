"""The k largest entries of a vector on accelerators, without a wait and with no sort.

Compiled by Triton, which torch brings along where there is one: import this only then. A sample
says what the k largest most likely reach; what reaches it is written down with how far it is above
that, and two counts of these distances tell the one of rank k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..bits import n_pieces
from .above import Size
from .picked import MODES, counted, sized

_TILE = 4096  # of candidates
_GATHERED = 512  # of these, by one program that waits for each
_SAMPLED = 512  # of one program
_COARSE, _FINE = 4096, 4096  # bins: of as many steps of a float32, and of one step each
_LOWEST = -(1 << 31)


class Chosen(NamedTuple):
    """Indices (int64) in rising order, their entries, and whether these are the k largest.

    The last is one int32 on the device: 0 says that the sample misled.
    """

    where: torch.Tensor
    entries: torch.Tensor
    holds: torch.Tensor


def largest(
    flat: torch.Tensor,
    k: int,
    *,
    size: Size,
    step: int,
    rank: int,
    most: int,
    holds: torch.Tensor | None = None,
) -> Chosen:
    """The k largest, of equal ones the first; NaN above all. Of at most 32 bits each.

    `rank` is that of the bound in a sample, every step-th entry; at most `most` reach it.
    `holds` is where that is to be written.
    """
    flat, device = flat.contiguous(), flat.device
    n, mode = flat.numel(), MODES[size]
    n_sampled = n_pieces(n, step)
    keys = torch.empty(n_sampled, dtype=torch.int32, device=device)
    _sample[n_pieces(n_sampled, _SAMPLED),](flat, keys, n, step, mode, _SAMPLED)
    least = torch.empty((), dtype=torch.float32, device=device)
    wide = 1 << (n_sampled - 1).bit_length()
    bins = torch.empty(_COARSE + _FINE, dtype=torch.int32, device=device)
    _bound[1,](keys, least, bins, n_sampled, rank, _LOWEST, wide, len(bins), num_warps=16)
    found = counted(flat, least, size=size)
    where, last = found.where(most), found.ends[-1:]
    above = torch.empty(most, dtype=torch.int32, device=device)
    reached = flat, least, where, last, above, bins
    _measure[n_pieces(most, _GATHERED),](*reached, most, mode, _COARSE, _FINE, _GATHERED)
    n_tiles = n_pieces(most, _TILE)
    _narrow[n_tiles,](above, last, bins, most, k, _COARSE, _FINE, _TILE, num_warps=8)
    counts = torch.empty(2, n_tiles, dtype=torch.int32, device=device)
    if holds is None:
        holds = torch.empty(1, dtype=torch.int32, device=device)
    _compare[n_tiles,](
        above, last, bins, counts, holds, most, k, n_tiles, _COARSE, _FINE, _TILE, num_warps=8
    )
    out = torch.empty(k, dtype=torch.int64, device=device)
    entries = torch.empty(k, dtype=flat.dtype, device=device)
    given = flat, above, where, last, bins, counts, out, entries
    _choose[n_tiles,](*given, most, k, n_tiles, _COARSE, _FINE, _TILE, num_warps=8)
    return Chosen(out, entries, holds)


@triton.jit
def _key(size):  # type: ignore[no-untyped-def]
    """An int32 that is larger the larger a float32 is."""
    bits = size.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def _sample(flat, keys, n, step, mode: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    to = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    at = to * step
    x = tl.load(flat + at, mask=at < n, other=0)
    tl.store(keys + to, _key(sized(x, mode, False)), mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def _bound(  # type: ignore[no-untyped-def]
    keys,
    least,
    bins,
    n,
    rank,
    lowest: tl.constexpr,
    tile: tl.constexpr,
    n_bins: tl.constexpr,
):
    """What the one of that rank reaches, but for the last of its digits; and clears the bins."""
    tl.store(bins + tl.arange(0, n_bins), tl.zeros([n_bins], tl.int32))
    at = tl.arange(0, tile)
    key = tl.load(keys + at, mask=at < n, other=lowest)
    low = tl.where(tl.sum((key >= 0).to(tl.int32)) >= rank, 0, lowest)
    for place in tl.static_range(18):
        higher = low + (1 << (30 - place))
        low = tl.where(tl.sum((key >= higher).to(tl.int32)) >= rank, higher, low)
    low = low ^ ((low >> 31) & 0x7FFFFFFF)
    tl.store(least, low.to(tl.float32, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _apart(far, n_bins: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a bin is, of a power of two of them: neighbours, which fill at once, lie apart."""
    return (far * 1031) % n_bins


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    flat,
    least,
    where,
    last,
    above,
    bins,
    most,
    mode: tl.constexpr,
    coarse: tl.constexpr,
    fine: tl.constexpr,
    tile: tl.constexpr,
):
    """How many steps each is above the bound; counts of these."""
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    there = at < tl.minimum(tl.load(last), most)
    index = tl.load(where + at, mask=there, other=0)
    x = tl.load(flat + index, mask=there, other=0)
    distance = _key(sized(x, mode, False)) - _key(tl.load(least))
    tl.store(above + at, distance, mask=there)
    far = distance.to(tl.uint32, bitcast=True) // fine
    # All that are further are as many as are left: they would wait for each other here.
    tl.atomic_add(bins + _apart(far, coarse), 1, mask=there & (far < coarse), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _place(bins, n, rank, n_bins: tl.constexpr):  # type: ignore[no-untyped-def]
    """The bin of the one of that rank from above, and how many are in bins above it.

    Of n in all; what is in no bin is above all. n_bins, if the one is not in any.
    """
    each = tl.arange(0, n_bins)
    count = tl.load(bins + _apart(each, n_bins))
    up_to = tl.cumsum(count, 0)
    beyond = n - tl.sum(count)
    reaching = n - up_to + count
    place = tl.max(tl.where(reaching >= rank, each, 0))
    place = tl.where(beyond >= rank, n_bins, place)
    higher = beyond + tl.sum(tl.where(each > place, count, 0))
    return place, higher


@triton.jit  # type: ignore[untyped-decorator]
def _narrow(  # type: ignore[no-untyped-def]
    above,
    last,
    bins,
    most,
    k,
    coarse: tl.constexpr,
    fine: tl.constexpr,
    tile: tl.constexpr,
):
    """Counts the steps of those in the bin of the one of rank k."""
    total = tl.minimum(tl.load(last), most).to(tl.int32)
    place, _ = _place(bins, total, k, coarse)
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    distance = tl.load(above + at, mask=at < total, other=-1).to(tl.uint32, bitcast=True)
    inside = (at < total) & (distance // fine == place.to(tl.uint32)) & (place < coarse)
    to = bins + coarse + _apart(distance % fine, fine)
    tl.atomic_add(to, 1, mask=inside, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _found(bins, total, k, coarse: tl.constexpr, fine: tl.constexpr):  # type: ignore[no-untyped-def]
    """Steps that the one of rank k is above the bound, how many are above it; the first's bin."""
    place, higher = _place(bins, total, k, coarse)
    inside = tl.sum(tl.load(bins + coarse + tl.arange(0, fine)))
    step, further = _place(bins + coarse, inside, k - higher, fine)
    return place * fine + step, higher + further, place


@triton.jit  # type: ignore[untyped-decorator]
def _compare(  # type: ignore[no-untyped-def]
    above,
    last,
    bins,
    counts,
    holds,
    most,
    k,
    n_tiles,
    coarse: tl.constexpr,
    fine: tl.constexpr,
    tile: tl.constexpr,
):
    """How many of each tile are above the one of rank k, and how many equal it."""
    reached = tl.load(last)
    total = tl.minimum(reached, most).to(tl.int32)
    least, _, place = _found(bins, total, k, coarse, fine)
    program = tl.program_id(0)
    at = program * tile + tl.arange(0, tile)
    distance = tl.load(above + at, mask=at < total, other=0).to(tl.uint32, bitcast=True)
    higher = (distance > least.to(tl.uint32)) & (at < total)
    equal = (distance == least.to(tl.uint32)) & (at < total)
    tl.store(counts + program, tl.sum(higher.to(tl.int32)))
    tl.store(counts + n_tiles + program, tl.sum(equal.to(tl.int32)))
    if program == 0:
        right = (reached >= k) & (reached <= most) & (place < coarse)
        tl.store(holds, right.to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    flat,
    above,
    where,
    last,
    bins,
    counts,
    out,
    entries,
    most,
    k,
    n_tiles,
    coarse: tl.constexpr,
    fine: tl.constexpr,
    tile: tl.constexpr,
):
    """Those above the one of rank k, and of those equal to it the first."""
    total = tl.minimum(tl.load(last), most).to(tl.int32)
    least, n_higher, _ = _found(bins, total, k, coarse, fine)
    program = tl.program_id(0)
    at = program * tile + tl.arange(0, tile)
    distance = tl.load(above + at, mask=at < total, other=0).to(tl.uint32, bitcast=True)
    higher = ((distance > least.to(tl.uint32)) & (at < total)).to(tl.int32)
    equal = ((distance == least.to(tl.uint32)) & (at < total)).to(tl.int32)
    before, equals = 0, 0
    for start in range(0, program, tile):
        earlier = start + tl.arange(0, tile)
        before += tl.sum(tl.load(counts + earlier, mask=earlier < program, other=0))
        equals += tl.sum(tl.load(counts + n_tiles + earlier, mask=earlier < program, other=0))
    equals = equals + tl.cumsum(equal, 0) - equal
    room = k - n_higher
    to = before + tl.cumsum(higher, 0) - higher + tl.minimum(equals, room)
    chosen = ((higher + equal * (equals < room).to(tl.int32)) > 0) & (to < k) & (to >= 0)
    index = tl.load(where + at, mask=chosen, other=0)
    tl.store(out + to, index, mask=chosen)
    tl.store(entries + to, tl.load(flat + index, mask=chosen, other=0), mask=chosen)
