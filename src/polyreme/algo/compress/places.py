"""Which entries of a tensor a packet holds: their indices, or one bit an entry if that is less."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import bits
from .above import Marked, picked

if TYPE_CHECKING:
    import torch


def n_bytes(k: int, n_entries: int) -> int:
    """Bytes that say which k of all entries; none, where it is all of them."""
    if k == n_entries:
        return 0
    return min(bits.n_bytes(k, bits.width(n_entries)), bits.n_bytes(n_entries, 1))


def pack(where: torch.Tensor, n_entries: int) -> torch.Tensor:
    """Indices in rising order, packed; of rows each for itself."""
    import torch

    k = where.shape[-1]
    if k == n_entries:
        return torch.zeros(*where.shape[:-1], 0, dtype=torch.uint8, device=where.device)
    if _as_bits(k, n_entries):
        return bits.pack(mask(where, n_entries), 1)
    return bits.pack(where, bits.width(n_entries))


def pack_found(found: Marked, k: int) -> torch.Tensor:
    """The same of what was found by bits, of which k are set."""
    if k != found.n_entries and _as_bits(k, found.n_entries):
        return found.mask
    return pack(found.where(k), found.n_entries)


def unpack(packed: torch.Tensor, k: int, n_entries: int) -> torch.Tensor:
    """The indices that `pack` was given."""
    import torch

    if k == n_entries:
        return torch.arange(n_entries, device=packed.device).expand(*packed.shape[:-1], -1)
    if _as_bits(k, n_entries):
        passes = picked(packed) if packed.dim() == 1 else None
        if passes is not None:
            where: torch.Tensor = passes.of_mask(packed, n_entries).where(k)
            return where
        found = bits.unpack(packed, 1, n_entries).nonzero()[:, -1]
        return found.view(*packed.shape[:-1], k)
    return bits.unpack(packed, bits.width(n_entries), k)


def mask(where: torch.Tensor, n_entries: int) -> torch.Tensor:
    """Booleans: whether an entry is among these; of rows each for itself."""
    import torch

    mask = torch.zeros(*where.shape[:-1], n_entries, dtype=torch.bool, device=where.device)
    return mask.scatter_(-1, where, True)


def _as_bits(k: int, n_entries: int) -> bool:
    return bits.n_bytes(n_entries, 1) < bits.n_bytes(k, bits.width(n_entries))
