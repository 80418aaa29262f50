"""A ring."""

from __future__ import annotations

from .kind import GraphKind


class RingGraph(GraphKind, frozen=True, kw_only=True, tag="Ring", tag_field="kind"):
    """Each worker with the one before and the one after: a third of each, from three workers on.

    Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?",
    section 5 (the ring of its experiments).
    """

    def neighbours(self, n: int, step: int, seed: int) -> list[set[int]]:
        """The one before and the one after."""
        return [{(i - 1) % n, (i + 1) % n} - {i} for i in range(n)]
