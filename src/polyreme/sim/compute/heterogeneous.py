"""Slow workers and fast ones."""

from __future__ import annotations

from .kind import ComputeKind, Positive, Share


class Heterogeneous(ComputeKind, frozen=True, kw_only=True, tag="heterogeneous", tag_field="kind"):
    """The first workers are slower than the others, always.

    Source: the heterogeneous setting of Shi, Yang and Li 2024, "Ordered Momentum for Asynchronous
    SGD", with share and factor left open.

    Attributes:
        seconds: Of one gradient of the others.
        slow_fraction: Share of the workers that are slow.
        slow_factor: How many times longer they take.
    """

    seconds: Positive = 1.0
    slow_fraction: Share = 0.25
    slow_factor: Positive = 5.0

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Longer for slow workers."""
        slow = rank < round(self.slow_fraction * n)
        return self.seconds * (self.slow_factor if slow else 1.0)
