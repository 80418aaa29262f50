"""Bits of many entries in one pass on accelerators, where torch's own operations take many.

Compiled by Triton, which torch brings along where there is one: import this only then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..bits import n_pieces

WIDEST = 57  # bits of a value that lie in eight bytes wherever they begin
_EIGHTS = 256  # of values, of one program
_ENTRIES = 1024  # of one program


def packed(values: torch.Tensor, width: int, size: int) -> torch.Tensor:
    """As `bits.pack`, of (rows, n) values to (rows, size) bytes."""
    values = values.contiguous()
    if values.dtype == torch.bool:
        values = values.view(torch.uint8)
    n_rows, n = values.shape
    out = torch.empty(n_rows, size, dtype=torch.uint8, device=values.device)
    if not out.numel():
        return out
    if width <= 8:
        grid = n_pieces(n, 8 * _EIGHTS), n_rows
        _pack_narrow[grid](values, out, n, size, width, _EIGHTS)
    else:
        grid = n_pieces(size, _EIGHTS), n_rows
        _pack_wide[grid](values, out, n, size, width, _EIGHTS)
    return out


def unpacked(octets: torch.Tensor, width: int, n: int) -> torch.Tensor:
    """As `bits.unpack`, of (rows, bytes) to (rows, n) values; at most `WIDEST` bits each."""
    octets = octets.contiguous()
    n_rows, size = octets.shape
    out = torch.empty(n_rows, n, dtype=torch.int64, device=octets.device)
    if out.numel():
        _unpack[n_pieces(n, _ENTRIES), n_rows](octets, out, n, size, width, _ENTRIES)
    return out


def signs(flat: torch.Tensor, *, sums: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each entry is at least 0, packed; and three float64, which are 0 unless `sums`.

    These are the sum of entries below 0 (NaN among them), that of all others, and their number.
    """
    flat, n = flat.contiguous(), flat.numel()
    n_programs = n_pieces(n, 8 * _EIGHTS)
    out = torch.empty(-(-n // 8), dtype=torch.uint8, device=flat.device)
    seen = torch.zeros(n_programs if sums else 0, 3, dtype=torch.float64, device=flat.device)
    if n:
        _signs[n_programs,](flat, out, seen, n, sums, _EIGHTS)
    return out, seen.sum(0)


def either(octets: torch.Tensor, two: torch.Tensor, n: int) -> torch.Tensor:
    """Of two values the first for each bit that is 0, the other for each that is 1."""
    out = torch.empty(n, dtype=two.dtype, device=two.device)
    if n:
        _either[n_pieces(n, _ENTRIES),](octets.contiguous(), two.contiguous(), out, n, _ENTRIES)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _pack_narrow(values, out, n, size, width: tl.constexpr, eights: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * eights
    row = tl.program_id(1).to(tl.int64)
    eight = first + tl.arange(0, eights)
    place = tl.arange(0, 8)
    at = eight[:, None] * 8 + place[None, :]
    value = tl.load(values + row * n + at, mask=at < n, other=0).to(tl.int64)
    word = tl.sum(value << (place.to(tl.int64) * width)[None, :], axis=1)
    for octet in tl.static_range(width):
        to = eight * width + octet
        tl.store(out + row * size + to, ((word >> (8 * octet)) & 255).to(tl.uint8), mask=to < size)


@triton.jit  # type: ignore[untyped-decorator]
def _pack_wide(values, out, n, size, width: tl.constexpr, octets: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    to = tl.program_id(0).to(tl.int64) * octets + tl.arange(0, octets)
    place = tl.arange(0, 8).to(tl.int64)
    bit = to[:, None] * 8 + place[None, :]
    at = bit // width
    value = tl.load(values + row * n + at, mask=at < n, other=0).to(tl.int64)
    octet = tl.sum(((value >> (bit % width)) & 1) << place[None, :], axis=1)
    tl.store(out + row * size + to, octet.to(tl.uint8), mask=to < size)


@triton.jit  # type: ignore[untyped-decorator]
def _unpack(octets, out, n, size, width: tl.constexpr, entries: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    bit = at * width
    first = bit >> 3
    word = tl.zeros([entries], dtype=tl.int64)
    for octet in tl.static_range((width + 14) // 8):
        there = (at < n) & (first + octet < size)
        loaded = tl.load(octets + row * size + first + octet, mask=there, other=0)
        word = word | (loaded.to(tl.int64) << (8 * octet))
    one = tl.full([entries], 1, dtype=tl.int64)
    tl.store(out + row * n + at, (word >> (bit & 7)) & ((one << width) - 1), mask=at < n)


@triton.jit  # type: ignore[untyped-decorator]
def _signs(x, out, seen, n, sums: tl.constexpr, eights: tl.constexpr):  # type: ignore[no-untyped-def]
    eight = tl.program_id(0).to(tl.int64) * eights + tl.arange(0, eights)
    place = tl.arange(0, 8)
    at = eight[:, None] * 8 + place[None, :]
    entry = tl.load(x + at, mask=at < n, other=-1.0)
    upper = entry >= 0
    octet = tl.sum(upper.to(tl.int32) << place[None, :], axis=1)
    tl.store(out + eight, octet.to(tl.uint8), mask=eight * 8 < n)
    if sums:
        wide = tl.where(at < n, entry.to(tl.float64), 0.0)
        row = seen + tl.program_id(0).to(tl.int64) * 3
        tl.store(row, tl.sum(tl.where(upper, 0.0, wide)))
        tl.store(row + 1, tl.sum(tl.where(upper, wide, 0.0)))
        tl.store(row + 2, tl.sum(upper.to(tl.int32)).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _either(octets, two, out, n, entries: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    octet = tl.load(octets + (at >> 3), mask=at < n, other=0).to(tl.int32)
    upper = ((octet >> (at & 7).to(tl.int32)) & 1) == 1
    tl.store(out + at, tl.where(upper, tl.load(two + 1), tl.load(two)), mask=at < n)
