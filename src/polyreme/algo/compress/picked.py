"""Which entries of a vector are at or above a value, or largest, in few passes on accelerators.

Compiled by Triton, which torch brings along where there is one: import this only then. Tiles of
entries count theirs first; where each tile's begin in the whole follows, and then they are written.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from .above import Size

Counts = Size | Literal["truth"]
_MODES = {"value": 0, "magnitude": 1, "turned": 2, "truth": 3}
_TILE = 4096
_NARROW = 1024  # of a tile of candidates, which are few


class Counted(NamedTuple):
    """How many entries of each tile reach a value, with those of all tiles before it."""

    flat: torch.Tensor
    least: torch.Tensor
    size: Counts
    ends: torch.Tensor

    @property
    def n(self) -> int:
        """How many do; waits for the device."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def where(self, n: int) -> torch.Tensor:
        """Indices (int64) in rising order of the first n."""
        out = torch.empty(n, dtype=torch.int64, device=self.flat.device)
        if n:
            self._write(out, None)
        return out

    def candidates(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, with their sizes; -inf stands where there are fewer."""
        out = torch.zeros(n, dtype=torch.int64, device=self.flat.device)
        sizes = torch.full((n,), -float("inf"), dtype=self.flat.dtype, device=self.flat.device)
        self._write(out, sizes)
        return out, sizes

    def _write(self, out: torch.Tensor, sizes: torch.Tensor | None) -> None:
        _write[len(self.ends),](
            self.flat,
            self.least,
            self.ends,
            out,
            out if sizes is None else sizes,
            self.flat.numel(),
            out.numel(),
            _MODES[self.size],
            sizes is not None,
            _accumulated(self.flat),
            _TILE,
        )


def counted(flat: torch.Tensor, least: torch.Tensor, *, size: Counts) -> Counted:
    """Of entries whose size is not below `least`; NaN is above all."""
    flat = flat.contiguous()
    if size == "truth":
        flat = flat.view(torch.uint8)
    n_tiles = triton.cdiv(flat.numel(), _TILE)
    counts = torch.empty(n_tiles, dtype=torch.int32, device=flat.device)
    if n_tiles:
        given = flat, least, counts, flat.numel(), _MODES[size], _accumulated(flat), _TILE
        _count[n_tiles,](*given)
    return Counted(flat, least, size, counts.cumsum(0))


def largest(
    flat: torch.Tensor, k: int, least: torch.Tensor, most: int, *, size: Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices in rising order of the k largest; of equal ones the first.

    Right where at least k entries and at most `most` are not below `least`: the second of both
    says so, on the device.
    """
    found = counted(flat, least, size=size)
    where, sizes = found.candidates(most)
    bound = sizes.topk(k, sorted=False).values.amin()
    n_tiles = triton.cdiv(most, _NARROW)
    above = torch.empty(n_tiles, dtype=torch.int32, device=flat.device)
    equal = torch.empty_like(above)
    wide = _accumulated(flat)
    _compare[n_tiles,](sizes, bound, above, equal, most, wide, _NARROW)
    ends = above.cumsum(0), equal.cumsum(0)
    out = torch.empty(k, dtype=torch.int64, device=flat.device)
    _choose[n_tiles,](
        sizes, where, bound, *ends, above, equal, out, most, n_tiles, k, wide, _NARROW
    )
    total = found.ends[-1]
    return out, (total >= k) & (total <= most)


def _accumulated(flat: torch.Tensor) -> bool:
    """Whether sizes are compared in float64: all others are exact in float32."""
    return flat.dtype == torch.float64


@triton.jit  # type: ignore[untyped-decorator]
def _sized(x, mode: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """What counts of entries, in a dtype that holds all; NaN as infinity."""
    found = x.to(tl.float64) if wide else x.to(tl.float32)
    if mode == 1:
        found = tl.abs(found)
    if mode == 2:
        found = -found
    return tl.where(found != found, float("inf"), found)


@triton.jit  # type: ignore[untyped-decorator]
def _reaching(x, least, there, mode: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    if mode == 3:
        return (x != 0) & there
    bound = tl.load(least)
    bound = bound.to(tl.float64) if wide else bound.to(tl.float32)
    return (_sized(x, mode, wide) >= bound) & there


@triton.jit  # type: ignore[untyped-decorator]
def _count(flat, least, counts, n, mode: tl.constexpr, wide: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    there = at < n
    reached = _reaching(tl.load(flat + at, mask=there, other=0), least, there, mode, wide)
    tl.store(counts + tl.program_id(0), tl.sum(reached.to(tl.int32)))


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    flat,
    least,
    ends,
    out,
    sizes,
    n,
    most,
    mode: tl.constexpr,
    sized: tl.constexpr,
    wide: tl.constexpr,
    tile: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    there = at < n
    x = tl.load(flat + at, mask=there, other=0)
    reached = _reaching(x, least, there, mode, wide)
    own = reached.to(tl.int32)
    to = tl.load(ends + tl.program_id(0)) - tl.sum(own) + tl.cumsum(own, 0) - 1
    kept = reached & (to < most)
    tl.store(out + to, at, mask=kept)
    if sized:
        tl.store(sizes + to, _sized(x, mode, wide).to(sizes.dtype.element_ty), mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _against(sizes, bound, n, wide: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether each of this tile is above the bound, and whether at it (0 or 1)."""
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    size = _sized(tl.load(sizes + at, mask=at < n, other=0), 0, wide)
    least = _sized(tl.load(bound), 0, wide)
    return ((size > least) & (at < n)).to(tl.int32), ((size == least) & (at < n)).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _compare(sizes, bound, above, equal, n, wide: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    is_above, is_equal = _against(sizes, bound, n, wide, tile)
    tl.store(above + tl.program_id(0), tl.sum(is_above))
    tl.store(equal + tl.program_id(0), tl.sum(is_equal))


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    sizes,
    where,
    bound,
    above_ends,
    equal_ends,
    above,
    equal,
    out,
    n,
    n_tiles,
    k,
    wide: tl.constexpr,
    tile: tl.constexpr,
):
    """Those above the bound, and of those at it the first."""
    program = tl.program_id(0)
    at = program * tile + tl.arange(0, tile)
    is_above, is_equal = _against(sizes, bound, n, wide, tile)
    room = k - tl.load(above_ends + n_tiles - 1)
    before = tl.load(above_ends + program) - tl.load(above + program)
    equals = tl.load(equal_ends + program) - tl.load(equal + program)
    equals = equals + tl.cumsum(is_equal, 0) - is_equal
    to = before + tl.cumsum(is_above, 0) - is_above + tl.minimum(equals, room)
    chosen = (is_above + is_equal * (equals < room).to(tl.int32)) > 0
    index = tl.load(where + at, mask=at < n, other=0)
    tl.store(out + to, index, mask=chosen & (to < k))
