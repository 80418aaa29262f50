"""One bit an entry, and the mean of each of the two halves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import bits
from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .precision import shaped, wide, widened

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class OneBit(CompressorKind, frozen=True, kw_only=True, tag="OneBit", tag_field="kind"):
    """Entries below zero become their mean, all others theirs.

    Source: Seide et al. 2014, "1-Bit Stochastic Gradient Descent".
    Differs: means are over the tensor, not over each of its columns. NaN counts as below zero,
    infinity where its sign is; either makes the mean of that half what it is.

    Attributes:
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The means below and from zero on; one bit an entry."""
        return (Buffer(wide(like.dtype), 2), Buffer("uint8", bits.n_bytes(like.n_entries, 1)))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The halves and their means."""
        import torch

        flat = widened(x)
        if (tiles := bits.compiled(flat)) is not None:
            signs, (lower_sum, upper_sum, n_upper) = tiles.signs(flat, sums=True)
            sums = torch.stack([lower_sum, upper_sum])
            counts = torch.stack([flat.numel() - n_upper, n_upper])
            return ((sums / counts.clamp(min=1)).to(flat.dtype), signs), state
        upper = flat >= 0
        halves = [flat[~upper].double(), flat[upper].double()]
        means = torch.stack([half.sum() / max(half.numel(), 1) for half in halves])
        return (means.to(flat.dtype), bits.pack(upper, 1)), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The mean of each entry's half."""
        import torch

        means, packed = buffers
        if (tiles := bits.compiled(packed)) is not None:
            two = means.to(getattr(torch, like.dtype))
            return shaped(tiles.either(packed, two, like.n_entries), like.shape, like.dtype)
        return shaped(means[bits.unpack(packed, 1, like.n_entries)], like.shape, like.dtype)
