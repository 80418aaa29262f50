"""Random numbers that are functions of what they are for."""

from __future__ import annotations


def uniform(seed: int, *of: int) -> float:
    """A number in (0, 1): of a seed, and of counts such as worker and batch."""
    import numpy as np

    (word,) = np.random.SeedSequence((seed, *of)).generate_state(1, np.uint64)
    return ((int(word) >> 12) + 0.5) * 2.0**-52
