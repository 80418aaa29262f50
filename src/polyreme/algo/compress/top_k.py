"""The entries that are largest by magnitude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from ..packet import Buffer, Like
from . import places
from .kind import State
from .sampled import largest_by_sample
from .sparsifier import Sparsifier, count

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class TopK(Sparsifier, frozen=True, kw_only=True, tag="TopK", tag_field="kind"):
    """The largest entries by magnitude; of equal ones those that come first.

    Source: Aji and Heafield 2017; Stich, Cordonnier and Jaggi 2018, section 2. "sampled" is
    the choice of Lin et al. 2018, "Deep Gradient Compression", as their code makes it.
    At least one entry is sent. Indices take as few bits as tell all entries apart, or one bit an
    entry if that is less. NaN and infinity count as largest.

    Attributes:
        ratio: Share of the entries that is sent, once warm; at least one is.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
        select: Whether the largest are found exactly, or those above a threshold that is guessed
            from a sample (quicker; may be fewer, and not quite the largest).
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    select: Literal["exact", "sampled"] = "exact"

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Indices, packed, in rising order; values."""
        if self.select == "sampled":
            return (Buffer("uint8", None), Buffer(like.dtype, None))
        n, k = like.n_entries, count(self.ratio, like.n_entries)
        return (Buffer("uint8", places.n_bytes(k, n)), Buffer(like.dtype, k))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The largest entries."""
        flat = x.reshape(-1)
        if self.select == "sampled":
            where = largest_by_sample(flat.abs(), self.ratio, draw)
        else:
            where = largest(flat.abs(), count(self.ratio, flat.numel()))
        return (places.pack(where, flat.numel()), flat[where]), state

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest entries."""
        packed, values = buffers
        return places.unpack(packed, values.numel(), like.n_entries), values


def largest(sizes: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest in rising order, NaN above all; of equal ones the first."""
    import torch

    if not k:
        return sizes.new_zeros(0).long()
    least = sizes.topk(k, sorted=False).values.min()
    where = (sizes >= least).nonzero().squeeze(-1)
    if where.numel() == k:
        return where
    sizes = sizes.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
    least = sizes.topk(k, sorted=False).values.min()
    above = (sizes > least).nonzero().squeeze(-1)
    ties = (sizes == least).nonzero().squeeze(-1)[: k - above.numel()]
    return torch.cat([above, ties]).sort().values
