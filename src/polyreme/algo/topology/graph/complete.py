"""All with all."""

from __future__ import annotations

from .kind import GraphKind


class Complete(GraphKind, frozen=True, kw_only=True, tag="Complete", tag_field="kind"):
    """Each worker with all others: the mean at every step.

    Source: Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication".
    """

    def neighbours(self, n: int, step: int, seed: int) -> list[set[int]]:
        """All others."""
        return [set(range(n)) - {i} for i in range(n)]
