"""A tensor cut into buckets of so many entries, the last one shorter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def n_buckets(n_entries: int, size: int) -> int:
    """How many there are; size 0 makes one of all entries."""
    return -(-n_entries // size) if size else min(n_entries, 1)


def bucketed(flat: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of `size` entries, the last one filled up with zeros; of rows each for itself."""
    import torch

    n = flat.shape[-1]
    padded = torch.nn.functional.pad(flat, (0, -n % size if size else 0))
    return padded.view(*flat.shape[:-1], n_buckets(n, size), size or n)


def spread(values: torch.Tensor, n_entries: int, size: int) -> torch.Tensor:
    """One value a bucket, for each of its entries; of rows each for itself."""
    if values.shape[-1] == 1:
        return values.expand(*values.shape[:-1], n_entries)
    return values.repeat_interleave(size or max(n_entries, 1), dim=-1)[..., :n_entries]
