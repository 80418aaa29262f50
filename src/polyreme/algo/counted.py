"""Random numbers by their place: number i of a key is a function of both, on any device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

COUNTED = 1 << 62
"""Keys are at least that, and seeds of torch's generators below."""

_GAMMA, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def hashed(key: torch.Tensor, n: int) -> torch.Tensor:
    """64 random bits (int64) for each of n places; `key` is one int64.

    Source: Steele et al. 2014, "Fast Splittable Pseudorandom Number Generators" (SplitMix64).
    """
    import torch

    # The key comes first: what is known of places alone torch works out in integers of any size.
    mixed = (torch.arange(n, device=key.device) + key) * _GAMMA
    # Shifts of signed numbers bring ones along.
    mixed = (mixed ^ (mixed >> 30 & ((1 << 34) - 1))) * _FIRST
    mixed = (mixed ^ (mixed >> 27 & ((1 << 37) - 1))) * _SECOND
    return mixed ^ (mixed >> 31 & ((1 << 33) - 1))


def mixed(key: torch.Tensor, n: int) -> torch.Tensor:
    """32 random bits (int32) for each of fewer than 2**31 places: a fifth of the arithmetic.

    Source: Wellons 2018, "Prospecting for Hash Functions" (lowbias32), of a place and one half of
    the key, and again of that and the other.
    """
    import torch

    places = torch.arange(n, dtype=torch.int32, device=key.device)
    for half in (key.int(), (key >> 32).int()):
        places = places ^ half
        # Shifts of signed numbers bring ones along.
        places = (places ^ (places >> 16 & 0xFFFF)) * 0x7FEB352D
        places = (places ^ (places >> 15 & 0x1FFFF)) * (0x846CA68B - (1 << 32))
        places = places ^ (places >> 16 & 0xFFFF)
    return places


def uniform(key: torch.Tensor, n: int, *, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in [0, 1), of all digits that float32 or float64 have there."""
    import torch

    if dtype == torch.float64:
        return (hashed(key, n) >> 11 & ((1 << 53) - 1)).to(dtype) * 2.0**-53
    digits = mixed(key, n) >> 8 if n < 1 << 31 else hashed(key, n) >> 40
    return (digits & ((1 << 24) - 1)).to(dtype) * 2.0**-24


def normal(key: torch.Tensor, n: int) -> torch.Tensor:
    """Normal numbers (float64). Source: Box and Muller 1958."""
    import torch

    drawn = uniform(key, 2 * n, dtype=torch.float64)
    return (-2 * (1 - drawn[:n]).log()).sqrt() * (2 * math.pi * drawn[n:]).cos()


def signs(key: torch.Tensor, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Plus or minus 1, as likely: 64 of them are the bits of a number, lowest first."""
    import torch

    bits = torch.arange(64, device=key.device)
    whole = hashed(key, (n + 63) // 64).unsqueeze(1) >> bits & 1
    return (1 - 2 * whole).to(dtype).view(-1)[:n]


def below(key: torch.Tensor, n: int, bound: int) -> torch.Tensor:
    """Integers (int64) from 0 to below 2**31 at most, as likely to a part in 2**31."""
    return (hashed(key, n) >> 1 & ((1 << 62) - 1)) % bound
