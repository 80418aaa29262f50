"""Matrices as a few of their singular vectors, drawn so that the mean is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from ..packet import Buffer, Like
from .kind import CompressorKind, State
from .matrices import gains, sides

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class ATOMO(CompressorKind, frozen=True, kw_only=True, tag="ATOMO", tag_field="kind"):
    """Singular values drawn with chances that make the variance least, over those chances.

    Tensors are matrices of their first dimension by all others. Vectors, and matrices of which
    `rank` pairs of vectors would be no smaller, go dense. An entry that is not finite makes the
    whole matrix NaN.

    Source: Wang et al. 2018, "ATOMO", algorithms 1 and 2, with the singular value decomposition.

    Attributes:
        rank: How many singular values are sent, in the mean of all draws (the sparsity budget).
        per: Tensors alone, as a vector of all of them has no rows.
        dense_below: Tensors with fewer entries are sent as they are.
    """

    rank: Annotated[int, msgspec.Meta(ge=1)] = 2
    per: Literal["tensor"] = "tensor"

    @property
    def unbiased(self) -> bool:
        """Always."""
        return True

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Left vectors with their values, right vectors; or the entries."""
        if not gains(like.shape, self.rank):
            return (Buffer(like.dtype, like.n_entries),)
        return (Buffer(like.dtype, None), Buffer(like.dtype, None))

    def encode(
        self, x: torch.Tensor, state: State, draw: Draw
    ) -> tuple[tuple[torch.Tensor, ...], State]:
        """The singular vectors that are drawn."""
        import torch

        if not gains(tuple(x.shape), self.rank):
            return (x.reshape(-1),), state
        wide = x.reshape(sides(tuple(x.shape))).to(torch.promote_types(x.dtype, torch.float32))
        if not torch.isfinite(wide).all():
            return tuple(x.new_full((n,), torch.nan) for n in wide.shape), state
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
        chance = chances(values, self.rank)
        drawn = torch.rand(chance.shape, generator=draw.own(), dtype=torch.float64)
        which = drawn.to(chance.device) < chance
        scaled = left[:, which] * (values / chance)[which]
        return (scaled.T.reshape(-1).to(x.dtype), right[which].reshape(-1).to(x.dtype)), state

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """The sum of the products."""
        if len(buffers) == 1:
            return buffers[0].view(like.shape)
        rows, columns = sides(like.shape)
        left, right = _wide(buffers[0]).view(-1, rows), _wide(buffers[1]).view(-1, columns)
        return (left.T @ right).to(buffers[0].dtype).view(like.shape)


def chances(values: torch.Tensor, budget: int) -> torch.Tensor:
    """Chances that sum to the budget, in proportion to falling values but none above 1; float64.

    Source: Wang et al. 2018, algorithm 1. Zeros have none.
    """
    import torch

    sizes = values.double()
    for sure in range(min(budget, sizes.numel())):
        rest = sizes[sure:].sum()
        share = (budget - sure) * sizes[sure:] / rest.clamp(min=torch.finfo(rest.dtype).tiny)
        if share[0] <= 1:
            return torch.cat([torch.ones_like(sizes[:sure]), share])
    sure_ones = torch.zeros_like(sizes)
    sure_ones[:budget] = 1
    return sure_ones * (sizes > 0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    import torch

    return x.to(torch.promote_types(x.dtype, torch.float32))
