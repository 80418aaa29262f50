"""Golomb codes of the gaps between entries that are sent.

Source: Golomb 1966; as used in Sattler et al. 2019, "Sparse Binary Compression".
Differs: the unary parts of all gaps stand before all remainders, which changes no length.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .. import bits
from .above import picked

if TYPE_CHECKING:
    import torch

_GOLDEN = (math.sqrt(5) + 1) / 2


def remainder(k: int, n_entries: int) -> int:
    """Bits of a gap's remainder that make codes shortest where k of n entries are sent."""
    if not k or k / n_entries >= 1 / _GOLDEN**2:
        return 0
    return 1 + math.floor(math.log2(math.log(_GOLDEN - 1) / math.log1p(-k / n_entries)))


def pack(where: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quotients in unary, and remainders of `width` bits, of indices in rising order."""
    import torch

    if where.numel() and (passes := picked(where, "gaps")) is not None:
        unary, rest = passes.split(where, width)
        return unary, bits.pack(rest, width)
    gaps = where.diff(prepend=where.new_full((1,), -1)) - 1
    ends = ((gaps >> width) + 1).cumsum(0) - 1
    unary = torch.ones(int(ends[-1]) + 1 if ends.numel() else 0, device=where.device).long()
    unary[ends] = 0
    return bits.pack(unary, 1), bits.pack(gaps & ((1 << width) - 1), width)


def unpack(unary: torch.Tensor, remainders: torch.Tensor, width: int, k: int) -> torch.Tensor:
    """The k indices that `pack` was given."""
    if k and (passes := picked(unary, "gaps")) is not None:
        found: torch.Tensor = passes.joined(unary, bits.unpack(remainders, width, k), width)
        return found
    ends = (bits.unpack(unary, 1, 8 * unary.numel()) == 0).nonzero().squeeze(-1)[:k]
    quotients = ends.diff(prepend=ends.new_full((1,), -1)) - 1
    gaps = (quotients << width) + bits.unpack(remainders, width, k)
    return (gaps + 1).cumsum(0) - 1
