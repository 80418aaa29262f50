"""What every compressor has: a form on the wire, a way there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from ...errors import undefined
from ..packet import Buffer, Like

if TYPE_CHECKING:
    import torch

    from ..draw import Draw
    from ..effects import Program
    from ..worker import Worker

State = dict[str, Any]
Combining = Callable[[Sequence["torch.Tensor"]], "Program[list[torch.Tensor]]"]
"""Sends tensors as one message and gives the aggregate of each over all workers."""


class CompressorKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A compressor turns a tensor into buffers and back; it keeps no state itself.

    Attributes:
        per: Whether each tensor of the model is compressed alone, or all of them as one vector.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    per: Literal["tensor", "model"] = "tensor"
    dense_below: Annotated[int, msgspec.Meta(ge=0)] = 0

    sparse: ClassVar[bool] = False
    """Whether packets name the entries that they hold (`kept`)."""
    in_rounds: ClassVar[bool] = False
    """Whether it has no packets but a program of several messages (`exchange`)."""

    @property
    def adds(self) -> bool:
        """Whether the sum of packets, buffer by buffer, is the packet of the sum.

        Buffers of integers are then the same on all workers, and stay as they are.
        """
        return False

    @property
    def unbiased(self) -> bool:
        """Whether the mean over all draws of what is decoded is what was encoded."""
        return False

    @property
    def stacks(self) -> bool:
        """Whether tensors alike may be compressed as rows of one, to the same bits.

        Then it has `encode_rows`, and no state; `decode` and `kept` of rows of buffers give rows.
        """
        return False

    @property
    def apart(self) -> CompressorKind:
        """What it is between two workers: one that exchanges in rounds among all has packets."""
        return self

    def at(self, step: int) -> CompressorKind:
        """What it is in a step, the same on all workers: for options that change with time."""
        return self

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """The buffers of a packet of such a tensor."""
        raise undefined(self, "form")

    def init(self, like: Like) -> State:
        """State before the first packet."""
        return {}

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """Buffers of a tensor, and the next state."""
        raise undefined(self, "encode")

    def encode_rows(
        self, rows: torch.Tensor, draws: Sequence[Draw]
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Of several tensors alike, each a row of all its entries: buffers as rows, and what they
        decode to, to the bit.
        """  # noqa: D205
        raise undefined(self, "encode_rows")

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The tensor that was meant, of that shape and type."""
        raise undefined(self, "decode")

    def kept(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """Which entries the packet holds, as booleans of that shape; of sparse ones alone."""
        raise undefined(self, "kept")

    def exchange(
        self,
        xs: Sequence[torch.Tensor],
        states: Sequence[State],
        draws: Sequence[Draw],
        combining: Combining,
        me: Worker,
    ) -> Program[tuple[list[torch.Tensor], list[torch.Tensor], list[State]]]:
        """Of several tensors at once: aggregates over all workers, what of this worker's own is
        in them (what feedback takes as sent), and the next states.
        """  # noqa: D205
        raise undefined(self, "exchange")
