"""One bit an entry: its sign."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .. import bits
from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .precision import shaped, wide, widened

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class Sign(CompressorKind, frozen=True, kw_only=True, tag="Sign", tag_field="kind"):
    """Signs alone, as they are or times the mean magnitude.

    Source: Bernstein et al. 2018, "signSGD" (no scale); Karimireddy et al. 2019, "Error Feedback
    Fixes SignSGD", algorithm 1 (the scale |x|_1 / d).
    Differs: zero is sent as plus, as one bit has no third value. NaN is sent as minus; with a
    scale, NaN or infinity anywhere is all that a receiver sees.

    Attributes:
        scale: What signs are multiplied with: 1 ("none") or the mean magnitude ("mean").
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    scale: Literal["none", "mean"] = "none"

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The mean magnitude, if it is wanted; one bit an entry."""
        signs = Buffer("uint8", bits.n_bytes(like.n_entries, 1))
        return (signs,) if self.scale == "none" else (Buffer(wide(like.dtype), 1), signs)

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Signs."""
        flat = widened(x)
        if (tiles := bits.compiled(flat)) is not None:
            signs, sums = tiles.signs(flat, sums=self.scale == "mean")
            mean = (sums[1] - sums[0]) / max(flat.numel(), 1)
            scale = () if self.scale == "none" else (mean.to(flat.dtype).view(1),)
            return (*scale, signs), state
        signs = bits.pack(flat >= 0, 1)
        if self.scale == "none":
            return (signs,), state
        mean = flat.abs().double().sum() / max(flat.numel(), 1)
        return (mean.to(flat.dtype).view(1), signs), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Signs times their scale."""
        import torch

        *scale, packed = buffers
        if (tiles := bits.compiled(packed)) is not None:
            size = scale[0] if scale else packed.new_ones(1, dtype=getattr(torch, like.dtype))
            two = torch.cat([-size, size]).to(getattr(torch, like.dtype))
            return shaped(tiles.either(packed, two, like.n_entries), like.shape, like.dtype)
        signs = (2 * bits.unpack(packed, 1, like.n_entries) - 1).double()
        return shaped(signs * scale[0] if scale else signs, like.shape, like.dtype)
