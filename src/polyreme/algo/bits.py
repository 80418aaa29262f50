"""Integers packed at any width, along the last dimension: rows are packed alike."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    Integers = NDArray[Any]


def compiled(like: torch.Tensor, name: str = "tiles") -> Any:
    """What that file of `compress` compiles, for tensors like that: elsewhere than on the host.

    None where there is none.
    """
    return None if like.device.type == "cpu" else _compiled(name)


def n_bytes(n_values: int, width: int) -> int:
    """Bytes of so many values of so many bits."""
    return -(-n_values * width // 8)


def n_pieces(n: int, size: int) -> int:
    """Of so many entries that hold n; triton's own is slow to ask."""
    return -(-n // size)


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Non-negative integers below 2**width, one after another, lowest bit first; uint8."""
    import torch

    if values.device.type == "cpu":
        return torch.from_numpy(_packed(values.numpy(), width))
    size = n_bytes(values.shape[-1], width)
    if values.numel() and (tiles := compiled(values)) is not None:
        rows: torch.Tensor = tiles.packed(values.reshape(-1, values.shape[-1]), width, size)
        return rows.view(*values.shape[:-1], size)
    shifts = torch.arange(width, device=values.device)
    bits = (values.long().unsqueeze(-1) >> shifts & 1).flatten(-2).to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, 8 * size - bits.shape[-1]))
    bits = bits.view(*values.shape[:-1], size, 8)
    weights = (1 << torch.arange(8, device=values.device)).to(torch.uint8)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def unpack(packed: torch.Tensor, width: int, n_values: int) -> torch.Tensor:
    """The integers (int64) that `pack` was given."""
    import torch

    if packed.device.type == "cpu":
        return torch.from_numpy(_unpacked(packed.numpy(), width, n_values).astype("<i8"))
    tiles = compiled(packed) if packed.numel() else None
    if tiles is not None and width <= tiles.WIDEST:
        rows: torch.Tensor = tiles.unpacked(packed.reshape(-1, packed.shape[-1]), width, n_values)
        return rows.view(*packed.shape[:-1], n_values)
    eight = torch.arange(8, device=packed.device, dtype=torch.uint8)
    bits = (packed.unsqueeze(-1) >> eight & 1).flatten(-2)[..., : n_values * width]
    bits = bits.reshape(*packed.shape[:-1], n_values, width)
    values = torch.zeros(bits.shape[:-1], dtype=torch.long, device=packed.device)
    for place in range(width):
        values |= bits[..., place].long() << place
    return values


def joined(values: torch.Tensor, *, width: int) -> torch.Tensor:
    """As `pack`, for functions to be fused: eight values are as many bytes as a value bits."""
    import torch

    *lead, n = values.shape
    n_eights = (n + 7) // 8
    # As narrow as they go: what several words are made of is written and read again.
    sizes = ((8, torch.uint8), (15, torch.int16), (31, torch.int32), (63, torch.int64))
    narrow = next(dtype for most, dtype in sizes if width <= most)
    eights = torch.nn.functional.pad(values.to(narrow), (0, 8 * n_eights - n))
    eights = eights.view(*lead, n_eights, 8)
    word = torch.int32 if 8 * width < 32 else torch.int64
    each = torch.arange(8, device=values.device, dtype=word)
    octets = []
    for start in range(0, 8 * width, 64):
        first, last = start // width, min(8, -(-(start + 64) // width))
        part, up = eights[..., first:last].to(word), each[first:last] * width - start
        if start:
            moved = torch.where(up < 0, part >> (-up).clamp(0, 63), part << up.clamp(0, 63))
        else:
            moved = part << up
        whole = moved.sum(-1, dtype=word).unsqueeze(-1)
        octets.append((whole >> 8 * each[: width - start // 8] & 255).to(torch.uint8))
    together = torch.cat(octets, -1) if len(octets) > 1 else octets[0]
    return together.flatten(-2)[..., : n_bytes(n, width)]


def parted(packed: torch.Tensor, n_values: int, *, width: int) -> torch.Tensor:
    """As `unpack`, for functions to be fused; of none there are no values."""
    import torch

    at = torch.arange(n_values, device=packed.device) * width
    first, last = at >> 3, packed.shape[-1] - 1
    held = packed[..., first].long()
    for further in range(1, (width + 14) // 8):
        # Beyond the last byte there are no bits of any value.
        held = held | packed[..., (first + further).clamp(max=last)].long() << 8 * further
    return held >> (at & 7) & ((1 << width) - 1)


def width(n_values: int) -> int:
    """Bits that tell so many values apart."""
    return max(1, (n_values - 1).bit_length())


@cache
def _compiled(name: str) -> Any:
    if find_spec("triton") is None:
        return None
    return import_module(f".compress.{name}", __package__)


def _packed(values: Integers, width: int) -> Integers:
    """As `pack`; eight narrow values at a time, which end where a byte does.

    A byte each at first, neighbours come together, then pairs of them, then fours.
    """
    import numpy as np

    *rows, n = values.shape
    if width == 1:
        return np.packbits(values.astype(np.uint8) & 1, axis=-1, bitorder="little")
    if width > 8:
        wide = np.dtype(_holding(width))
        octets = values.astype(wide).view(np.uint8).reshape(*rows, n, wide.itemsize)
        each = np.unpackbits(octets, axis=-1, count=width, bitorder="little")
        return np.packbits(each.reshape(*rows, n * width), axis=-1, bitorder="little")
    n_eights = -(-n // 8)
    eights = np.zeros((*rows, 8 * n_eights), dtype=np.uint8)
    eights[..., :n] = values
    words = eights.view("<u8")
    for n_each in (1, 2, 4):
        mask, up = _mask(n_each, width), n_each * width
        words = words & mask | (words >> 8 * n_each & mask) << up
    octets = words.view(np.uint8).reshape(*rows, n_eights, 8)[..., :width]
    return octets.reshape(*rows, n_eights * width)[..., : n_bytes(n, width)]


def _unpacked(packed: Integers, width: int, n_values: int) -> Integers:
    """As `unpack`: the same the other way round."""
    import numpy as np

    rows = packed.shape[:-1]
    if width == 1:
        return np.unpackbits(packed, axis=-1, count=n_values, bitorder="little")
    if width > 8:
        wide = np.dtype(_holding(width))
        each = np.unpackbits(packed, axis=-1, count=n_values * width, bitorder="little")
        padded = np.zeros((*rows, n_values, 8 * wide.itemsize), dtype=np.uint8)
        padded[..., :width] = each.reshape(*rows, n_values, width)
        return np.packbits(padded, axis=-1, bitorder="little").view(wide)[..., 0]
    n_eights, held = -(-n_values // 8), n_bytes(n_values, width)
    filled = np.zeros((*rows, n_eights * width), dtype=np.uint8)
    filled[..., :held] = packed[..., :held]
    octets = np.zeros((*rows, n_eights, 8), dtype=np.uint8)
    octets[..., :width] = filled.reshape(*rows, n_eights, width)
    words = octets.view("<u8")[..., 0]
    for n_each in (4, 2, 1):
        mask, down = _mask(n_each, width), n_each * width
        words = words & mask | (words >> down & mask) << 8 * n_each
    return words.view(np.uint8)[..., :n_values]


def _mask(n: int, width: int) -> Any:
    """The lowest n values of every 2 n bytes of eight."""
    import numpy as np

    return np.uint64(sum((1 << n * width) - 1 << at for at in range(0, 64, 16 * n)))


def _holding(width: int) -> str:
    """The narrowest unsigned type that holds so many bits, lowest byte first."""
    return next(f"<u{octets}" for octets in (1, 2, 4, 8) if 8 * octets >= width)
