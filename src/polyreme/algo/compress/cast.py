"""Half precision on the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..packet import Buffer, Like
from .kind import CompressorKind, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


class Cast(CompressorKind, frozen=True, kw_only=True, tag="Cast", tag_field="kind"):
    """Entries rounded to 16 bits. Source: Micikevicius et al. 2018 (fp16).

    Attributes:
        to: "fp16" (more digits; above 65,504 infinite) or "bf16" (as wide as float32).
        per: Whether each tensor of the model is sent alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    to: Literal["fp16", "bf16"] = "bf16"

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The rounded entries."""
        return (Buffer(_TYPES[self.to], like.n_entries),)

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The rounded entries."""
        import torch

        return (x.reshape(-1).to(getattr(torch, _TYPES[self.to])),), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The rounded entries, in their former type."""
        import torch

        return buffers[0].to(getattr(torch, like.dtype)).view(like.shape)
