"""A matrix as a product of two thin ones, of one worker's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .matrices import directions, gains, matrix, orthonormal, product, sides, times, turned_times

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class LowRank(CompressorKind, frozen=True, kw_only=True, tag="LowRank", tag_field="kind"):
    """One step of power iteration on a worker's own matrix: packets of P and Q, that is P Q^T.

    PowerSGD without its rounds: what it is between neighbours, and on a server's way back. Tensors
    that gain nothing go dense.

    Source: Vogels, Karimireddy and Jaggi 2019, "PowerSGD", algorithm 1, for one worker.

    Attributes:
        rank: Columns of the factors.
        warm: Whether a step starts from the last one's directions; if not, from drawn ones.
        per: Tensors alone, as a vector of all of them has no rows.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    rank: Annotated[int, msgspec.Meta(ge=1)] = 2
    warm: bool = True
    per: Literal["tensor"] = "tensor"

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Both factors, or all entries."""
        if not gains(like.shape, self.rank):
            return (Buffer(like.dtype, like.n_entries),)
        rows, columns = sides(like.shape)
        return Buffer(like.dtype, rows * self.rank), Buffer(like.dtype, columns * self.rank)

    def init(self, like: Like) -> State:
        """No directions yet."""
        import torch

        if not gains(like.shape, self.rank):
            return {}
        _, columns = sides(like.shape)
        return {"directions": torch.zeros(columns, self.rank, dtype=getattr(torch, like.dtype))}

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """P, orthonormal, and Q."""
        if not state:
            return (x.reshape(-1),), state
        whole = matrix(x)
        last = state["directions"]
        start = directions(last, draw, warm=self.warm, device=x.device).to(whole)
        left = orthonormal(times(whole, start))
        right = turned_times(whole, left).to(x.dtype)
        return (left.to(x.dtype).reshape(-1), right.reshape(-1)), {"directions": right}

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """P Q^T."""
        import torch

        if len(buffers) == 1:
            return buffers[0].view(like.shape)
        wide = torch.promote_types(buffers[0].dtype, torch.float32)
        left, right = (each.to(wide).view(-1, self.rank) for each in buffers)
        return product(left, right).to(buffers[0].dtype).view(like.shape)
