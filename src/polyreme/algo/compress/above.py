"""The entries at or above a value, found on an accelerator by blocks that hold any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ..fused import applies, fused

if TYPE_CHECKING:
    import torch

Size = Literal["value", "magnitude", "turned"]
"""What counts of an entry: as it is, without its sign, or with the other."""

_BLOCK = 16  # entries that are looked at together: of few large ones most blocks hold none
_MANY = 1 << 16


def above(flat: torch.Tensor, least: torch.Tensor, *, size: Size) -> torch.Tensor:
    """Indices in rising order of entries whose size is not below; NaN is not."""
    import torch

    if not applies(flat) or flat.numel() < _MANY:
        few: torch.Tensor = _reaching(flat, least, size=size).nonzero().squeeze(-1)
        return few
    n_whole = flat.numel() // _BLOCK
    blocks = flat[: n_whole * _BLOCK].reshape(n_whole, _BLOCK)
    holding = fused(_holding, size=size)(blocks, least).nonzero().squeeze(-1)
    reaching = _reaching(blocks[holding], least, size=size)
    at = reaching.view(-1).nonzero().squeeze(-1)
    found: torch.Tensor = holding[at // _BLOCK] * _BLOCK + at % _BLOCK
    if n_whole * _BLOCK == flat.numel():
        return found
    rest = _reaching(flat[n_whole * _BLOCK :], least, size=size)
    return torch.cat([found, rest.nonzero().squeeze(-1) + n_whole * _BLOCK])


def _reaching(flat: torch.Tensor, least: torch.Tensor, *, size: Size) -> torch.Tensor:
    if size == "turned":
        return (flat > -least).logical_not()
    return ((flat.abs() if size == "magnitude" else flat) < least).logical_not()


def _holding(blocks: torch.Tensor, least: torch.Tensor, *, size: Size) -> torch.Tensor:
    """Whether each block holds any."""
    return _reaching(blocks, least, size=size).any(-1)
