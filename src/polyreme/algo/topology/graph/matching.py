"""Pairs drawn at every step."""

from __future__ import annotations

from ...draw import Draw
from .kind import GraphKind

_USE = 0x6D61746368


class RandomMatching(GraphKind, frozen=True, kw_only=True, tag="RandomMatching", tag_field="kind"):
    """Pairs, drawn anew at every step alike on all workers, take the mean of two.

    Of an odd number one stays alone.
    Source: Boyd et al. 2006, "Randomized Gossip Algorithms" (synchronous).
    """

    def period(self, n: int) -> None:
        """Drawn."""

    def neighbours(self, n: int, step: int, seed: int) -> list[set[int]]:
        """The other of the pair."""
        import torch

        draw = Draw(seed=seed, worker=0, step=step).at(_USE)
        order = torch.randperm(n, generator=draw.shared()).tolist()
        near: list[set[int]] = [set() for _ in range(n)]
        for a, b in zip(order[::2], order[1::2], strict=False):
            near[a].add(b)
            near[b].add(a)
        return near

    def spectral_gap(self, n: int) -> float:
        """1 - lambda_2 of the mean of W^T W, which here is the mean of W."""
        if n == 1:
            return 1.0
        return n / (2 * (n - 1)) if n % 2 == 0 else 0.5
