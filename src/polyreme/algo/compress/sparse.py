"""What every compressor has that sends some entries and leaves the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...errors import undefined
from ..packet import Like
from . import places
from .kind import CompressorKind

if TYPE_CHECKING:
    import torch


class SparseKind(CompressorKind, frozen=True, kw_only=True):
    """A compressor whose packets name entries; all others decode to zero."""

    sparse: ClassVar[bool] = True

    def held(
        self, buffers: tuple[torch.Tensor, ...], like: Like
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of the entries that a packet holds, in rising order, and their values."""
        raise undefined(self, "held")

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Zero but for the entries that were sent."""
        import torch

        where, values = self.held(buffers, like)
        dtype = getattr(torch, like.dtype)
        out = scattered(where, values.to(dtype), like.n_entries)
        return out.view((*where.shape[:-1], *like.shape))

    def kept(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The entries that were sent."""
        where, _ = self.held(buffers, like)
        mask = places.mask(where, like.n_entries)
        return mask.view((*where.shape[:-1], *like.shape))


def scattered(where: torch.Tensor, values: torch.Tensor, n_entries: int) -> torch.Tensor:
    """Zeros but for these entries; of rows each for itself."""
    return values.new_zeros(*where.shape[:-1], n_entries).scatter_(-1, where, values)
