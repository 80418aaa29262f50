"""Random numbers that are functions of what they are for."""

from __future__ import annotations

from ...algo.draw import mix


def uniform(seed: int, *of: int) -> float:
    """A number in (0, 1): of a seed, and of counts such as worker and batch."""
    word = mix(len(of), seed)
    for number in of:
        word = mix(word, number)
    return ((word >> 12) + 0.5) * 2.0**-52
