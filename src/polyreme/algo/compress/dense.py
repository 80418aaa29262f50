"""No compression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..packet import Buffer, Like
from .kind import CompressorKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class Dense(CompressorKind, frozen=True, kw_only=True, tag="Dense", tag_field="kind"):
    """All entries as they are. Source: no paper; what others are compared with.

    Attributes:
        per: Whether each tensor of the model is sent alone, or all of them as one vector.
        dense_below: Says nothing here.
    """

    @property
    def adds(self) -> bool:
        """Always."""
        return True

    @property
    def unbiased(self) -> bool:
        """Always."""
        return True

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The entries."""
        return (Buffer(like.dtype, like.n_entries),)

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The entries."""
        return (x.reshape(-1),), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The entries."""
        return buffers[0].view(like.shape)
