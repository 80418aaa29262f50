"""Entries that would be the largest of their bin after one more step alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from .. import bits
from ..packet import Buffer, Like
from . import places
from .buckets import bucketed, spread
from .kind import State
from .precision import wide, widened
from .sparse import SparseKind

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class AdaComp(SparseKind, frozen=True, kw_only=True, tag="AdaComp", tag_field="kind"):
    """Sends entry i of G = residue + gradient if |G + gradient| is at least its bin's largest |G|.

    Source: Chen et al. 2018, "AdaComp", algorithms 1 and 2: all values are a sign times the mean
    over bins of the largest |G|. The residue is that of a feedback that adds what was not sent
    (ErrorFeedback, DGC, ...); the compressor keeps a copy to tell the gradient from it. Without
    such a feedback it takes entries whose change is large.
    Differs: bins of zeros send nothing; indices are of the tensor, not of the bin. A bin that holds
    NaN is sent, and NaN or infinity anywhere is all that a receiver sees of sent entries.

    Attributes:
        bin_size: Entries of a bin; the paper takes 50 for convolutions and 500 for others.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    bin_size: Annotated[int, msgspec.Meta(ge=1)] = 500

    def init(self, like: Like) -> State:
        """No residue."""
        import torch

        return {"residue": torch.zeros(like.shape, dtype=getattr(torch, like.dtype))}

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The scale; indices, packed, in rising order; how many; signs."""
        return (
            Buffer(wide(like.dtype), 1),
            Buffer("int32", 1),
            Buffer("uint8", None),
            Buffer("uint8", None),
        )

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Signs of the entries that count."""
        import torch

        flat = widened(x)
        residue = state["residue"].to(x.device)
        sizes = (2 * flat - widened(residue)).abs()
        tops = bucketed(flat.abs(), self.bin_size)
        tops = tops.amax(1) if tops.numel() else flat.new_zeros(0)
        top = spread(tops, flat.numel(), self.bin_size)
        where = (~(sizes < top) & ~(top == 0)).nonzero().squeeze(-1)
        scale = tops.double().sum().to(flat.dtype) / max(tops.numel(), 1)
        buffers = (
            scale.view(1),
            torch.full((1,), where.numel(), dtype=torch.int32, device=x.device),
            places.pack(where, flat.numel()),
            bits.pack(flat[where] < 0, 1),
        )
        like = Like.of(x)
        return buffers, {"residue": x - self.decode(buffers, like)}

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that counted."""
        scale, count, packed, signs = buffers
        k = int(count)
        signs = 1 - 2 * bits.unpack(signs, 1, k)
        return places.unpack(packed, k, like.n_entries), signs * scale
