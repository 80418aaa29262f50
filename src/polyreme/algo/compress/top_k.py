"""The entries that are largest by magnitude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from .. import bits
from ..packet import Buffer, Like
from .kind import CompressorKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class TopK(CompressorKind, frozen=True, kw_only=True, tag="TopK", tag_field="kind"):
    """The largest entries by magnitude; of equal ones those that come first.

    Source: Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018, definition 2.1. At least one
    entry is sent. Indices take as few bits as tell all entries apart.

    Attributes:
        ratio: Share of the entries that is sent.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    sparse: ClassVar[bool] = True
    ratio: Ratio = 0.01

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Indices, packed, in rising order; values."""
        n, k = like.n_entries, self._k(like.n_entries)
        return (
            Buffer("uint8", bits.n_bytes(k, bits.width(n))),
            Buffer(like.dtype, k),
        )

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The largest entries."""
        flat = x.reshape(-1)
        where = largest(flat.abs(), self._k(flat.numel()))
        return (bits.pack(where, bits.width(flat.numel())), flat[where]), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Zero but for the entries that were sent."""
        packed, values = buffers
        where = bits.unpack(packed, bits.width(like.n_entries), values.numel())
        out = values.new_zeros(like.n_entries)
        out[where] = values
        return out.view(like.shape)

    def kept(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The entries that were sent."""
        where = bits.unpack(buffers[0], bits.width(like.n_entries), buffers[1].numel())
        mask = buffers[1].new_zeros(like.n_entries).bool()
        mask[where] = True
        return mask.view(like.shape)

    def _k(self, n_entries: int) -> int:
        return min(n_entries, max(1, math.floor(self.ratio * n_entries + 1e-9)))


def largest(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest in rising order, NaN above all; of equal ones the first."""
    if not k:
        return sizes.new_zeros(0).long()
    sizes = sizes.nan_to_num(nan=math.inf, posinf=math.inf)
    least = sizes.topk(k, sorted=False).values.min()
    above = (sizes > least).nonzero().squeeze(-1)
    ties = (sizes == least).nonzero().squeeze(-1)[: k - above.numel()]
    return _merged(above, ties)


def _merged(above: torch.Tensor, ties: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([above, ties]).sort().values
