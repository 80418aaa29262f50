"""Integers packed at any width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Integers = NDArray[Any]


def n_bytes(n_values: int, width: int) -> int:
    """Bytes of so many values of so many bits."""
    return -(-n_values * width // 8)


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Non-negative integers below 2**width, one after another, lowest bit first; uint8."""
    import torch

    if values.device.type == "cpu":
        return torch.from_numpy(_packed(values.reshape(-1).numpy(), width))
    shifts = torch.arange(width, device=values.device)
    bits = (values.long().unsqueeze(-1) >> shifts & 1).reshape(-1).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).view(-1, 8)
    weights = (1 << torch.arange(8, device=values.device)).to(torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, width: int, n_values: int) -> torch.Tensor:
    """The integers (int64) that `pack` was given."""
    import torch

    if packed.device.type == "cpu":
        return torch.from_numpy(_unpacked(packed.numpy(), width, n_values).astype("<i8"))
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


def _packed(values: Integers, width: int) -> Integers:
    """As `pack`; eight narrow values at a time, which end where a byte does."""
    import numpy as np

    if width == 1:
        return np.packbits(values.astype(np.uint8) & 1, bitorder="little")
    if width > 8:
        wide = np.dtype(_holding(width))
        octets = values.astype(wide).view(np.uint8).reshape(-1, wide.itemsize)
        each = np.unpackbits(octets, axis=1, count=width, bitorder="little")
        return np.packbits(each, bitorder="little")
    eights = np.zeros((-(-len(values) // 8), 8), dtype="<u8")
    eights.reshape(-1)[: len(values)] = values
    eights &= (1 << width) - 1
    words = eights[:, 0].copy()
    for place in range(1, 8):
        words |= eights[:, place] << place * width
    octets = words.view(np.uint8).reshape(-1, 8)[:, :width]
    return octets.reshape(-1)[: n_bytes(len(values), width)]


def _unpacked(packed: Integers, width: int, n_values: int) -> Integers:
    """As `unpack`."""
    import numpy as np

    if width == 1:
        return np.unpackbits(packed, count=n_values, bitorder="little")
    if width > 8:
        wide = np.dtype(_holding(width))
        each = np.unpackbits(packed, count=n_values * width, bitorder="little")
        padded = np.zeros((n_values, 8 * wide.itemsize), dtype=np.uint8)
        padded[:, :width] = each.reshape(n_values, width)
        return np.packbits(padded, bitorder="little").view(wide)
    octets = np.zeros((-(-n_values // 8), 8), dtype=np.uint8)
    rows = np.zeros(len(octets) * width, dtype=np.uint8)
    rows[: n_bytes(n_values, width)] = packed[: n_bytes(n_values, width)]
    octets[:, :width] = rows.reshape(len(octets), width)
    words = octets.reshape(-1).view("<u8")
    eights = np.empty((len(words), 8), dtype=np.uint8)
    for place in range(8):
        eights[:, place] = words >> place * width & (1 << width) - 1
    return eights.reshape(-1)[:n_values]


def _holding(width: int) -> str:
    """The narrowest unsigned type that holds so many bits, lowest byte first."""
    return next(f"<u{octets}" for octets in (1, 2, 4, 8) if 8 * octets >= width)
