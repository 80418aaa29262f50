"""Tensors as matrices of their first dimension by all others, and thin matrices beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..packet import Like

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


def gains(shape: tuple[int, ...], rank: int) -> bool:
    """Whether factors of that rank hold less than a tensor of that shape."""
    rows, columns = sides(shape)
    return rank * (rows + columns) < rows * columns


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix; one column for a vector."""
    n_rows = shape[0] if shape else 1
    return n_rows, Like(shape[1:], "").n_entries


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same space, filled up where that has fewer dimensions."""
    import torch

    basis: torch.Tensor = torch.linalg.qr(columns).Q
    return basis


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Rows by columns, in float32 at least."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    return x.reshape(x.shape[0], -1).to(wide)


def directions(last: torch.Tensor, draw: Draw, *, warm: bool) -> torch.Tensor:
    """Where power iteration starts: the last directions, or drawn ones, the same on all workers."""
    import torch

    lengths = last.abs().sum(0)
    usable = torch.isfinite(lengths) & (lengths > 0) & warm
    if usable.all():
        return last
    drawn = torch.randn(last.shape, generator=draw.shared(), dtype=torch.float64).to(last)
    return torch.where(usable, last, drawn)
