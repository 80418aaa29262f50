"""Types and order that norms, means and maxima are had in."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ROW = 4096


def wide(dtype: str) -> str:
    """float64 for float64; float32 for all others, of which 16 bits are too few."""
    return "float64" if dtype == "float64" else "float32"


def widened(x: torch.Tensor) -> torch.Tensor:
    """All entries as one vector in that type."""
    import torch

    return x.reshape(-1).to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def shaped(flat: torch.Tensor, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A vector as a tensor of that shape and type; of rows each."""
    import torch

    return flat.to(getattr(torch, dtype)).view((*flat.shape[:-1], *shape))


def total(values: torch.Tensor) -> torch.Tensor:
    """The sum of a vector, where that is compiled.

    In two steps, of rows of one length and of these: how a single one is spread over a device is
    settled by the first vector that it is compiled for, which may be short.
    """
    return _rows(values).sum(-1).sum()


def most(sizes: torch.Tensor) -> torch.Tensor:
    """The largest of a vector of magnitudes, likewise; NaN where any is."""
    return _rows(sizes).amax(-1).amax()


def _rows(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.pad(values, (0, -values.numel() % _ROW)).view(-1, _ROW)
