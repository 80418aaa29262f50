"""What every compressor has: a form on the wire, a way there and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from ..packet import Buffer, Like

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

State = dict[str, Any]


class CompressorKind(msgspec.Struct, frozen=True, kw_only=True):
    """A compressor turns a tensor into buffers and back; it keeps no state itself.

    Attributes:
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    per: Literal["tensor", "model"] = "tensor"
    dense_below: Annotated[int, msgspec.Meta(ge=0)] = 0

    adds: ClassVar[bool] = False
    """Whether the sum of packets is the packet of the sum."""

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The buffers of a packet of such a tensor."""
        raise NotImplementedError

    def init(self, like: Like) -> State:
        """State before the first packet."""
        return {}

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Buffers of a tensor, and the next state."""
        raise NotImplementedError

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The tensor that was meant, of that shape and type."""
        raise NotImplementedError
