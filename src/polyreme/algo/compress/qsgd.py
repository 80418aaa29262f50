"""Entries rounded at random to a few levels of the norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from .. import bits, counted
from ..fused import applies, fused
from ..packet import Buffer, Like
from . import elias
from .buckets import bucketed, n_buckets, spread
from .kind import CompressorKind, State
from .precision import shaped, total, wide, widened

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class QSGD(CompressorKind, frozen=True, kw_only=True, tag="QSGD", tag_field="kind"):
    """Each entry becomes a level of its bucket's norm, at random so that the mean is right.

    Source: Alistarh et al. 2017, "QSGD", section 3.1 (bucketed: section 4); codes: section 3.2.
    The norm of each bucket is sent beside the levels.
    Differs: norms are summed in float64; gaps run on from one bucket into the next. A bucket
    that holds NaN or infinity decodes to NaN.

    Attributes:
        levels: Levels above zero.
        bucket: Entries that share a norm; 0 is the whole tensor.
        coding: How levels are written: "fixed" takes as many bits for each as tell levels and
            signs apart; "elias" names levels above zero and the gaps between them in Elias codes,
            for few levels; "elias_dense" names all levels in Elias codes.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    levels: Annotated[int, msgspec.Meta(ge=1, le=2**15)] = 15
    bucket: Annotated[int, msgspec.Meta(ge=0)] = 0
    coding: Literal["fixed", "elias", "elias_dense"] = "fixed"

    @property
    def unbiased(self) -> bool:
        """Always."""
        return True

    @property
    def stacks(self) -> bool:
        """If all tensors alike take as many bytes."""
        return self.coding == "fixed"

    @property
    def _width(self) -> int:
        return bits.width(2 * self.levels + 1)

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Norms; levels with their sign, packed."""
        fixed = bits.n_bytes(like.n_entries, self._width)
        return (
            Buffer(wide(like.dtype), n_buckets(like.n_entries, self.bucket)),
            Buffer("uint8", fixed if self.coding == "fixed" else None),
        )

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Levels, drawn."""
        if applies(x) and self.coding == "fixed":
            return self._coded(x, draw), state
        norms, signed = self._drawn(x.reshape(1, x.numel()), [draw])
        return (norms[0], self._written(signed[0])), state

    def encode_rows(
        self, rows: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Levels of each, drawn."""
        if applies(rows) and self.coding == "fixed":
            # A sum depends on what is summed beside it, so each row is encoded alone.
            import torch

            each = [self._coded(row, draw) for row, draw in zip(rows, draws, strict=True)]
            norms, packed = (torch.stack(column) for column in zip(*each, strict=True))
            return (norms, packed), self.decode((norms, packed), Like.of(rows[0]))
        norms, signed = self._drawn(rows, draws)
        decoded = self._meant(norms, signed).to(rows.dtype)
        return (norms, self._written(signed)), decoded

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Levels times their norm."""
        import torch

        norms, packed = buffers
        if applies(packed) and self.coding == "fixed":
            if (rounded := self._rounded(packed)) is not None:
                dtype, rows = getattr(torch, like.dtype), packed.reshape(-1, packed.shape[-1])
                each = [
                    rounded.of_levels(row, norm, like.n_entries, self.levels, self._width, dtype)
                    for row, norm in zip(rows, norms.reshape(-1, 1), strict=True)
                ]
                meant = each[0] if packed.dim() == 1 else torch.stack(each)
                return meant.view((*packed.shape[:-1], *like.shape))
            read = fused(
                _shown,
                levels=self.levels,
                bucket=self.bucket,
                width=self._width,
                dtype=like.dtype,
            )
            out: torch.Tensor = read(norms, packed, like.n_entries)
            return out.view((*packed.shape[:-1], *like.shape))
        meant = self._meant(norms, self._read(packed, like.n_entries))
        return shaped(meant, like.shape, like.dtype)

    def _meant(self, norms: torch.Tensor, signed: torch.Tensor) -> torch.Tensor:
        return _meant(norms, signed, self.levels, self.bucket)

    def _coded(self, x: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms and packed levels of a tensor on an accelerator."""
        rounded = self._rounded(x)
        if rounded is not None and rounded.applies(x):
            flat, key = x.reshape(-1), draw.key("own", x.device)
            norm = rounded.norm(flat)
            return norm, rounded.levels(flat, norm, key, self.levels, self._width)
        write = fused(_coded, levels=self.levels, bucket=self.bucket, width=self._width)
        norms, packed = write(x.reshape(-1), draw.key("own", x.device))
        return norms, packed

    def _rounded(self, like: torch.Tensor) -> Any:
        """Compiled passes: of narrow levels of one norm."""
        rounded = None if self.bucket else bits.compiled(like, "rounded")
        return None if rounded is None or self._width > rounded.NARROW else rounded

    def _drawn(
        self, rows: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norms and levels with their sign of each row."""
        import torch

        x = widened(rows).view(rows.shape)
        # A sum depends on what is summed beside it, so each row is summed alone.
        norms = torch.stack(
            [
                torch.linalg.vector_norm(row, dim=1, dtype=torch.float64)
                for row in bucketed(x, self.bucket)
            ]
        ).to(x.dtype)
        # All is level 0 of no norm.
        scale = spread(norms.where(norms > 0, math.inf), x.shape[-1], self.bucket)
        level = x.abs().div_(scale).mul_(self.levels)
        low = level.floor()
        chance = torch.stack([draw.uniform(row) for draw, row in zip(draws, x, strict=True)])
        # What is left above the lower level, less a chance below 1, rounds up to 1 or 0.
        up = level.sub_(low).sub_(chance).ceil_()
        signed = low.add_(up).clamp_(max=self.levels).copysign_(x)
        if not norms.isfinite().all():
            # What is not finite has no level; the norm beside it says so.
            signed.nan_to_num_(0.0)
        return norms, signed.int()

    def _written(self, signed: torch.Tensor) -> torch.Tensor:
        import torch

        if self.coding == "fixed":
            return bits.pack(signed + self.levels, self._width)
        signed = signed.long()
        sign = (signed < 0).long()
        if self.coding == "elias_dense":
            code, length = elias.codes(signed.abs() + 1)
            # A level of zero has no sign.
            signs = torch.stack([sign, (signed != 0).long()])
            codes, lengths = torch.stack([code, signs[0]], 1), torch.stack([length, signs[1]], 1)
        else:
            where = signed.nonzero().squeeze(-1)
            gap = elias.codes(where.diff(prepend=where.new_full((1,), -1)))
            level = elias.codes(signed[where].abs())
            codes = torch.stack([gap[0], sign[where], level[0]], 1)
            lengths = torch.stack([gap[1], torch.ones_like(where), level[1]], 1)
        return elias.write(codes.view(-1), lengths.view(-1))

    def _read(self, packed: torch.Tensor, n_entries: int) -> torch.Tensor:
        import torch

        if self.coding == "fixed":
            return bits.unpack(packed, self._width, n_entries) - self.levels
        reader = elias.Reader(packed)
        if self.coding == "elias_dense":
            signed = (reader.value > 1).long()
            at = reader.chain(reader.next + signed)[:n_entries]
            sign = 1 - 2 * reader.bits[reader.next[at]]
            return (reader.value[at] - 1) * sign
        sign_at = reader.next.clamp(max=reader.end)
        level_at = (sign_at + 1).clamp(max=reader.end)
        at = reader.chain(reader.next[level_at])
        where = reader.value[at].cumsum(0) - 1
        level = reader.value[level_at[at]] * (1 - 2 * reader.bits[sign_at[at]])
        out = torch.zeros(n_entries, dtype=torch.long, device=packed.device)
        out[where] = level
        return out


def _meant(norms: torch.Tensor, signed: torch.Tensor, levels: int, bucket: int) -> torch.Tensor:
    norms = norms.masked_fill(norms.isinf(), float("nan"))
    shares = signed.to(norms.dtype).div_(levels)
    return shares.mul_(spread(norms, signed.shape[-1], bucket))


def _coded(
    x: torch.Tensor, key: torch.Tensor, *, levels: int, bucket: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    flat = widened(x)
    squares = flat.double().square()
    sums = bucketed(squares, bucket).sum(-1) if bucket else total(squares).view(1)
    norms = sums.sqrt().to(flat.dtype)
    scale = spread(torch.where(norms > 0, norms, math.inf), flat.numel(), bucket)
    level = flat.abs() / scale * levels
    low = level.floor()
    up = (level - low - counted.uniform(key, flat.numel(), dtype=flat.dtype)).ceil()
    signed = (low + up).clamp(max=levels).copysign(flat).nan_to_num(0.0)
    return norms, bits.joined(signed.int() + levels, width=width)


def _shown(
    norms: torch.Tensor,
    packed: torch.Tensor,
    n_entries: int,
    *,
    levels: int,
    bucket: int,
    width: int,
    dtype: str,
) -> torch.Tensor:
    import torch

    signed = bits.parted(packed, n_entries, width=width) - levels
    return _meant(norms, signed, levels, bucket).to(getattr(torch, dtype))
