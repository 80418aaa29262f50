"""Entries rounded at random and packed in one pass on accelerators, and read in one.

Compiled by Triton, which torch brings along where there is one: import this only then. The numbers
are those of `counted.uniform` for fewer than 2**31 float32; entries have at most 32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..bits import n_pieces

_EIGHTS = 128  # of values, of one program
_FIVES = 256
_ENTRIES = 1024
_SUMMED = 4096

NARROW = 8  # bits of a level at most


def applies(flat: torch.Tensor) -> bool:
    """Whether there are numbers for such entries."""
    return flat.dtype != torch.float64 and 0 < flat.numel() < 1 << 31


def norm(flat: torch.Tensor) -> torch.Tensor:
    """Of a vector: one float32, of squares summed in float64."""
    flat, n = flat.contiguous(), flat.numel()
    sums = torch.empty(n_pieces(n, _SUMMED), dtype=torch.float64, device=flat.device)
    _squares[len(sums),](flat, sums, sums, n, False, _SUMMED)
    return sums.sum(0, keepdim=True).sqrt().float()


def levels(
    flat: torch.Tensor, norm: torch.Tensor, key: torch.Tensor, n_levels: int, width: int
) -> torch.Tensor:
    """Levels of a norm, packed, as QSGD has them."""
    n = flat.numel()
    out = torch.empty(-(-n * width // 8), dtype=torch.uint8, device=flat.device)
    given = flat.contiguous(), norm, key, out, n, out.numel(), n_levels
    _levels[n_pieces(n, 8 * _EIGHTS),](*given, width, _EIGHTS)
    return out


def of_levels(
    octets: torch.Tensor, norm: torch.Tensor, n: int, n_levels: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """What levels mean."""
    out = torch.empty(n, dtype=dtype, device=octets.device)
    given = octets.contiguous(), norm, out, n, octets.numel(), n_levels
    _of_levels[n_pieces(n, 8 * _EIGHTS),](*given, width, _EIGHTS)
    return out


def powers(flat: torch.Tensor, key: torch.Tensor, most: int) -> torch.Tensor:
    """Exponents up to `most` and signs, packed, as Natural has them."""
    n = flat.numel()
    out = torch.empty(-(-n * 9 // 8), dtype=torch.uint8, device=flat.device)
    given = flat.contiguous(), key, out, n, out.numel(), most
    _powers[n_pieces(n, 8 * _EIGHTS),](*given, _EIGHTS)
    return out


def of_powers(octets: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """What exponents and signs mean."""
    out = torch.empty(n, dtype=dtype, device=octets.device)
    given = octets.contiguous(), out, n, octets.numel()
    _of_powers[n_pieces(n, 8 * _EIGHTS),](*given, _EIGHTS)
    return out


def scale(flat: torch.Tensor, clip: float) -> torch.Tensor:
    """The largest magnitude, as TernGrad cuts it: one float32."""
    flat, n, device = flat.contiguous(), flat.numel(), flat.device
    n_tiles = n_pieces(n, _SUMMED)
    sums = torch.empty(n_tiles, dtype=torch.float64, device=device)
    most = torch.empty(n_tiles, dtype=torch.float32, device=device)
    _extent[n_tiles,](flat, sums, most, n, _SUMMED)
    top = most.amax(0, keepdim=True)
    if clip:
        total = sums.sum(0, keepdim=True)
        _squares[n_tiles,](flat, total, sums, n, True, _SUMMED)
        _cut[1,](top, sums.sum(0, keepdim=True), n, clip, torch.finfo(torch.float32).eps)
    return top


def signs(flat: torch.Tensor, scale: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Zeros and signs, five a byte, as TernGrad has them."""
    n = flat.numel()
    out = torch.empty(-(-n // 5), dtype=torch.uint8, device=flat.device)
    _signs[n_pieces(n, 5 * _FIVES),](flat.contiguous(), scale, key, out, n, _FIVES)
    return out


def of_signs(octets: torch.Tensor, scale: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """What zeros and signs mean."""
    out = torch.empty(n, dtype=dtype, device=octets.device)
    _of_signs[n_pieces(n, _ENTRIES),](octets.contiguous(), scale, out, n, _ENTRIES)
    return out


@triton.jit
def _chance(key, at):  # type: ignore[no-untyped-def]
    """As `counted.uniform`."""
    held = tl.load(key)
    place = at.to(tl.uint32)
    for half in tl.static_range(2):
        place = place ^ ((held >> (32 * half)) & 0xFFFFFFFF).to(tl.uint32)
        place = (place ^ (place >> 16)) * 0x7FEB352D
        place = (place ^ (place >> 15)) * 0x846CA68B
        place = place ^ (place >> 16)
    return (place >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit  # type: ignore[untyped-decorator]
def _squares(x, total, sums, n, centred: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of squares of tiles; of distances from the mean, if it is to be `centred`."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    entry = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32).to(tl.float64)
    if centred:
        entry = tl.where(at < n, entry - tl.load(total) / n, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(entry * entry))


@triton.jit  # type: ignore[untyped-decorator]
def _extent(x, sums, most, n, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    entry = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(entry.to(tl.float64)))
    broken = tl.max((entry != entry).to(tl.int32)) > 0
    largest = tl.max(tl.where(entry != entry, 0.0, tl.abs(entry)))
    tl.store(most + tl.program_id(0), tl.where(broken, float("nan"), largest))


@triton.jit
def _cut(top, squares, n, clip, eps):  # type: ignore[no-untyped-def]
    """Of what is not finite there is no deviation, and no receiver is to see anything of it."""
    one = tl.arange(0, 1)
    largest = tl.load(top + one)
    deviation = tl.sqrt(tl.load(squares + one) / n)
    limit = (deviation * clip).to(tl.float32)
    alike = deviation <= (largest * eps).to(tl.float64)
    limit = tl.where(alike | (limit > largest), largest, limit)
    finite = tl.abs(deviation) < float("inf")
    tl.store(top + one, tl.where(finite, limit, float("nan")))


@triton.jit  # type: ignore[untyped-decorator]
def _levels(  # type: ignore[no-untyped-def]
    x,
    norm,
    key,
    out,
    n,
    size,
    n_levels,
    width: tl.constexpr,
    eights: tl.constexpr,
):
    eight = tl.program_id(0).to(tl.int64) * eights + tl.arange(0, eights)
    place = tl.arange(0, 8)
    at = eight[:, None] * 8 + place[None, :]
    entry = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    length = tl.load(norm)
    # All is level 0 of no norm.
    length = tl.where(length > 0, length, float("inf"))
    level = tl.div_rn(tl.abs(entry), tl.zeros_like(entry) + length) * n_levels
    low = tl.floor(level)
    up = tl.ceil(level - low - _chance(key, at))
    code = tl.minimum(tl.where(level == level, low + up, 0.0), n_levels * 1.0).to(tl.int32)
    code = tl.where(entry < 0, n_levels - code, n_levels + code)
    code = tl.where(at < n, code, 0)
    word = tl.sum(code.to(tl.int64) << (place.to(tl.int64) * width)[None, :], axis=1)
    for octet in tl.static_range(width):
        to = eight * width + octet
        tl.store(out + to, ((word >> (8 * octet)) & 255).to(tl.uint8), mask=to < size)


@triton.jit  # type: ignore[untyped-decorator]
def _of_levels(  # type: ignore[no-untyped-def]
    octets,
    norm,
    out,
    n,
    size,
    n_levels,
    width: tl.constexpr,
    eights: tl.constexpr,
):
    eight = tl.program_id(0).to(tl.int64) * eights + tl.arange(0, eights)
    place = tl.arange(0, 8)
    word = tl.zeros([eights], dtype=tl.int64)
    for octet in tl.static_range(width):
        at = eight * width + octet
        held = tl.load(octets + at, mask=at < size, other=0).to(tl.int64)
        word = word | (held << (8 * octet))
    code = (word[:, None] >> (place.to(tl.int64) * width)[None, :]) & ((1 << width) - 1)
    share = (code.to(tl.int32) - n_levels).to(tl.float32)
    length = tl.load(norm)
    length = tl.where(length == float("inf"), float("nan"), length)
    meant = tl.div_rn(share, tl.zeros_like(share) + n_levels) * length
    to = eight[:, None] * 8 + place[None, :]
    tl.store(out + to, meant.to(out.dtype.element_ty), mask=to < n)


@triton.jit  # type: ignore[untyped-decorator]
def _powers(x, key, out, n, size, most, eights: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nine bits a value: eight of them are a word and eight bits of the last."""
    eight = tl.program_id(0).to(tl.int64) * eights + tl.arange(0, eights)
    place = tl.arange(0, 8)
    at = eight[:, None] * 8 + place[None, :]
    entry = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    held = entry.to(tl.int32, bitcast=True)
    exponent = (held >> 23) & 255
    above = (held & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07
    up = (_chance(key, at) < above).to(tl.int32)
    code = tl.where(exponent < 255, tl.minimum(exponent + up, most), 255)
    code = code | ((entry < 0).to(tl.int32) << 8)
    code = tl.where(at < n, code, 0)
    word = tl.sum(code.to(tl.int64) << (place.to(tl.int64) * 9)[None, :], axis=1)
    last = tl.sum(tl.where((place == 7)[None, :], code >> 1, 0), axis=1)
    for octet in tl.static_range(8):
        to = eight * 9 + octet
        tl.store(out + to, ((word >> (8 * octet)) & 255).to(tl.uint8), mask=to < size)
    tl.store(out + eight * 9 + 8, last.to(tl.uint8), mask=eight * 9 + 8 < size)


@triton.jit  # type: ignore[untyped-decorator]
def _of_powers(octets, out, n, size, eights: tl.constexpr):  # type: ignore[no-untyped-def]
    eight = tl.program_id(0).to(tl.int64) * eights + tl.arange(0, eights)
    place = tl.arange(0, 8)
    word = tl.zeros([eights], dtype=tl.int64)
    for octet in tl.static_range(8):
        at = eight * 9 + octet
        held = tl.load(octets + at, mask=at < size, other=0).to(tl.int64)
        word = word | (held << (8 * octet))
    last = tl.load(octets + eight * 9 + 8, mask=eight * 9 + 8 < size, other=0).to(tl.int32)
    code = ((word[:, None] >> (place.to(tl.int64) * 9)[None, :]) & 511).to(tl.int32)
    code = tl.where((place == 7)[None, :], (code & 1) | (last << 1)[:, None], code)
    meant = (code << 23).to(tl.float32, bitcast=True)
    to = eight[:, None] * 8 + place[None, :]
    tl.store(out + to, meant.to(out.dtype.element_ty), mask=to < n)


@triton.jit  # type: ignore[untyped-decorator]
def _signs(x, scale, key, out, n, fives: tl.constexpr):  # type: ignore[no-untyped-def]
    five = tl.program_id(0).to(tl.int64) * fives + tl.arange(0, fives)
    largest = tl.load(scale)
    octet = tl.zeros([fives], dtype=tl.int32)
    for place in tl.static_range(5):
        # The last one of five counts most.
        at = five * 5 + (4 - place)
        entry = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
        size = tl.minimum(tl.abs(entry), largest)
        drawn = _chance(key, at) * largest < size
        digit = 1 + tl.where(drawn, tl.where(entry < 0, -1, 1), 0)
        octet = octet * 3 + tl.where(at < n, digit, 0)
    tl.store(out + five, octet.to(tl.uint8), mask=five * 5 < n)


@triton.jit  # type: ignore[untyped-decorator]
def _of_signs(octets, scale, out, n, entries: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * entries + tl.arange(0, entries)
    five = at // 5
    place = (at - five * 5).to(tl.int32)
    octet = tl.load(octets + five, mask=at < n, other=0).to(tl.int32)
    # Over a power of 3, of numbers below 3**5.
    over = tl.where(place == 0, 65536, tl.where(place == 1, 21846, 7282))
    over = tl.where(place == 3, 2428, tl.where(place == 4, 810, over))
    digit = ((octet * over) >> 16) % 3 - 1
    largest = tl.load(scale)
    largest = tl.where(tl.abs(largest) == float("inf"), float("nan"), largest)
    tl.store(out + at, (digit * largest).to(out.dtype.element_ty), mask=at < n)
