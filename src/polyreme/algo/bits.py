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
    import torch

    shifts = torch.arange(width, device=values.device)
    bits = (values.long().unsqueeze(-1) >> shifts & 1).reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    weights = (1 << torch.arange(8, device=values.device)).to(torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, width: int, n_values: int) -> torch.Tensor:
    """The integers (int64) that `pack` was given."""
    import torch

    eight = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> eight & 1).reshape(-1)[: n_values * width]
    weights = 1 << torch.arange(width, device=packed.device)
    return (bits.view(n_values, width).long() * weights).sum(-1)


def width(n_values: int) -> int:
    """Bits that tell so many values apart."""
    return max(1, (n_values - 1).bit_length())
