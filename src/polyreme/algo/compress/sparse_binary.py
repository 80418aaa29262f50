"""The largest entries, all as one magnitude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import bits
from ..packet import Buffer, Like
from . import golomb
from .kind import State
from .precision import wide, widened
from .sparsifier import Sparsifier, count
from .top_k import leading

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class SBC(Sparsifier, frozen=True, kw_only=True, tag="SBC", tag_field="kind"):
    """The k largest entries or the k smallest, whichever are further from zero, as their mean.

    Source: Sattler et al. 2019, "Sparse Binary Compression", algorithm 2; of equal means the
    positive one. Gaps between entries are Golomb codes. It is meant for error feedback. NaN counts
    as largest and makes the mean NaN, as infinity makes it infinite.

    Attributes:
        ratio: Share of the entries that is sent, once warm; at least one is.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The mean with its sign; quotients and remainders of gaps."""
        k = count(self.ratio, like.n_entries)
        width = golomb.remainder(k, like.n_entries)
        return (
            Buffer(wide(like.dtype), 1),
            Buffer("uint8", None),
            Buffer("uint8", bits.n_bytes(k, width)),
        )

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The entries of one side, and their mean."""
        import torch

        flat = widened(x)
        k = count(self.ratio, flat.numel())
        upper, lower = leading(flat, k, "value", "turned")
        means = [side.entries.sum(dtype=torch.float64) / max(k, 1) for side in (upper, lower)]
        # Which one it is the host need not know.
        turned = -means[1] > means[0]
        where = torch.where(turned, lower.where, upper.where)
        mean = torch.where(turned, means[1], means[0])
        gaps = golomb.pack(where, golomb.remainder(k, flat.numel()))
        return (mean.to(flat.dtype).view(1), *gaps), state

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries of one side."""
        k = count(self.ratio, like.n_entries)
        where = golomb.unpack(buffers[1], buffers[2], golomb.remainder(k, like.n_entries), k)
        return where, buffers[0].expand(k)


class STC(SBC, frozen=True, kw_only=True, tag="STC", tag_field="kind"):
    """The k largest entries by magnitude, as their sign times their mean magnitude.

    Source: Sattler et al. 2020, "Robust and Communication-Efficient Federated Learning from
    Non-IID Data", algorithm 1. Gaps between entries are Golomb codes. It is meant for error
    feedback, in the paper on both ways. NaN and infinity count as largest and become the mean.

    Attributes:
        ratio: Share of the entries that is sent, once warm; at least one is.
        warmup_epochs: Epochs in which the share falls to `ratio`, by the same factor each.
        epoch_steps: Steps of such an epoch.
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The mean; quotients and remainders of gaps; signs."""
        signs = Buffer("uint8", bits.n_bytes(count(self.ratio, like.n_entries), 1))
        return (*super().form(like), signs)

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The largest entries, and their mean."""
        import torch

        flat = widened(x)
        k = count(self.ratio, flat.numel())
        where, held = leading(flat, k, "magnitude")[0]
        mean = held.abs().sum(dtype=torch.float64) / max(k, 1)
        gaps = golomb.pack(where, golomb.remainder(k, flat.numel()))
        return (mean.to(flat.dtype).view(1), *gaps, bits.pack(held < 0, 1)), state

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest entries."""
        where, values = super().held(buffers[:3], like)
        return where, values * (1 - 2 * bits.unpack(buffers[3], 1, values.numel()))
