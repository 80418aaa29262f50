"""Entries rounded at random to a few levels of the norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .. import bits
from ..packet import Buffer, Like
from .buckets import bucketed, n_buckets, spread
from .kind import CompressorKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class QSGD(CompressorKind, frozen=True, kw_only=True, tag="QSGD", tag_field="kind"):
    """Each entry becomes a level of its bucket's norm, at random so that the mean is right.

    Source: Alistarh et al. 2017, "QSGD", section 3.1 (bucketed: section 4). A level takes
    log2(levels + 1) bits and a sign; the norm of each bucket is sent beside them.

    Attributes:
        levels: Levels above zero.
        bucket: Entries that share a norm; 0 is the whole tensor.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    levels: Annotated[int, msgspec.Meta(ge=1, le=2**15)] = 15
    bucket: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def _width(self) -> int:
        return bits.width(2 * self.levels + 1)

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Norms; levels with their sign, packed."""
        return (
            Buffer(like.dtype, n_buckets(like.n_entries, self.bucket)),
            Buffer("uint8", bits.n_bytes(like.n_entries, self._width)),
        )

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Levels, drawn."""
        import torch

        flat = x.reshape(-1)
        norms = bucketed(flat, self.bucket).norm(dim=1)
        scale = spread(norms, flat.numel(), self.bucket)
        level = torch.where(scale > 0, flat.abs() * self.levels / scale, torch.zeros_like(flat))
        low = level.floor()
        up = torch.rand(flat.shape, dtype=flat.dtype, generator=draw.own(), device="cpu")
        level = (low + (up.to(flat.device) < level - low)).clamp(max=self.levels)
        signed = level * flat.sign() + self.levels
        return (norms, bits.pack(signed, self._width)), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Levels times their norm."""
        norms, packed = buffers
        signed = bits.unpack(packed, self._width, like.n_entries) - self.levels
        scale = spread(norms, like.n_entries, self.bucket)
        return (signed.to(norms.dtype) * scale / self.levels).view(like.shape)
