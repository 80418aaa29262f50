"""Tensors as matrices of their first dimension by all others, and thin matrices beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import bits, counted
from ..fused import applies, fused
from ..packet import Like

if TYPE_CHECKING:
    import torch

    from ..draw import Draw

_THIN = 8  # columns up to which a product waits for what it writes, not for arithmetic


def gains(shape: tuple[int, ...], rank: int) -> bool:
    """Whether factors of that rank hold less than a tensor of that shape."""
    rows, columns = sides(shape)
    return rank * (rows + columns) < rows * columns


def sides(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix; one column for a vector."""
    n_rows = shape[0] if shape else 1
    return n_rows, Like(shape[1:], "").n_entries


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same space.

    Where it has fewer dimensions others fill up; of thin matrices on accelerators zeros do.
    """
    import torch

    thin = bits.compiled(columns, "thin") if applies(columns) else None
    if thin is not None and len(columns) <= thin.MOST_ROWS:
        n_columns = columns.shape[1]
        if n_columns <= min(len(columns), thin.MOST_COLUMNS):
            found: torch.Tensor = thin.orthonormal(columns)
            return found
    basis: torch.Tensor = torch.linalg.qr(columns).Q
    return basis


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Rows by columns, in float32 at least."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    return x.reshape(x.shape[0], -1).to(wide)


def times(whole: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """A matrix times a thin one."""
    products = bits.compiled(whole, "products")
    if products is None or not products.applies(whole, thin):
        return whole @ thin
    found: torch.Tensor = products.times(whole, thin)
    return found


def turned_times(whole: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """A matrix, turned, times a thin one."""
    products = bits.compiled(whole, "products")
    if products is None or not products.applies(whole, thin):
        return whole.T @ thin
    found: torch.Tensor = products.turned_times(whole, thin)
    return found


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix that two thin ones of as many columns make: left right^T."""
    rank = left.shape[1]
    if applies(left) and applies(right) and rank <= _THIN:
        products = bits.compiled(left, "products")
        if products is not None:
            found: torch.Tensor = products.outer(left, right)
            return found
        made: torch.Tensor = fused(_outer, rank=rank)(left, right)
        return made
    return left @ right.T


def _outer(left: torch.Tensor, right: torch.Tensor, *, rank: int) -> torch.Tensor:
    whole = left[:, 0].unsqueeze(1) * right[:, 0]
    for column in range(1, rank):
        whole = whole + left[:, column].unsqueeze(1) * right[:, column]
    return whole


def directions(last: torch.Tensor, draw: Draw, *, warm: bool, device: torch.device) -> torch.Tensor:
    """Where power iteration starts: the last directions, or drawn ones, the same on all workers.

    A host and an accelerator draw others: workers are all hosts or all accelerators.
    """
    import torch

    last = last.to(device)
    products = bits.compiled(last, "products") if last.numel() else None
    if products is not None:
        started: torch.Tensor = products.directions(last, draw.key("shared", device), warm=warm)
        return started
    lengths = last.abs().sum(0)
    usable = torch.isfinite(lengths) & (lengths > 0) & warm
    if applies(last):  # without waiting for what is usable
        key = draw.key("shared", device)
        drawn = fused(counted.normal)(key, last.numel()).view(last.shape).to(last)
    elif usable.all():
        return last
    else:
        drawn = torch.randn(last.shape, generator=draw.shared(), dtype=torch.float64).to(last)
    return torch.where(usable, last, drawn)
