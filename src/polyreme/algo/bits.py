"""Integers packed at any width."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def n_bytes(n_values: int, width: int) -> int:
    """Bytes of so many values of so many bits."""
    return -(-n_values * width // 8)


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Non-negative integers below 2**width, one after another, lowest bit first; uint8."""
    import numpy as np
    import torch

    shifts = torch.arange(width, device=values.device)
    bits = (values.long().unsqueeze(-1) >> shifts & 1).reshape(-1).to(torch.uint8)
    if values.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    weights = (1 << torch.arange(8, device=values.device)).to(torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, width: int, n_values: int) -> torch.Tensor:
    """The integers (int64) that `pack` was given."""
    import numpy as np
    import torch

    if packed.device.type == "cpu":
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little"))
    else:
        eight = torch.arange(8, device=packed.device, dtype=torch.uint8)
        bits = (packed.unsqueeze(-1) >> eight & 1).reshape(-1)
    bits = bits[: n_values * width].view(n_values, width)
    values = torch.zeros(n_values, dtype=torch.long, device=packed.device)
    for place in range(width):
        values |= bits[:, place].long() << place
    return values


def width(n_values: int) -> int:
    """Bits that tell so many values apart."""
    return max(1, (n_values - 1).bit_length())
