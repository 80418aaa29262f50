"""The entries at or above a magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ..packet import Buffer, Like
from . import places
from .above import above
from .kind import State
from .sparse import SparseKind

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class Threshold(SparseKind, frozen=True, kw_only=True, tag="Threshold", tag_field="kind"):
    """The entries of at least that magnitude; none, where none is.

    Source: Strom 2015 (the choice of entries); Dutta et al. 2020 and Sahu et al. 2021 ("hard
    threshold": their values). NaN and infinity are sent.

    Attributes:
        threshold: Magnitude from which on an entry is sent.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    threshold: Annotated[float, msgspec.Meta(gt=0)] = 0.01

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Indices, packed, in rising order; values."""
        return (Buffer("uint8", None), Buffer(like.dtype, None))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The entries that are large enough."""
        flat = x.reshape(-1)
        least = flat.new_full((), self.threshold)
        where = above(flat, least, size="magnitude")
        return (places.pack(where, flat.numel()), flat[where]), state

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries that were large enough."""
        packed, values = buffers
        return places.unpack(packed, values.numel(), like.n_entries), values
