"""Means of a few rows drawn at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from .kind import BeforeKind

if TYPE_CHECKING:
    from ..geometry import Array, Points


class Bucketing(BeforeKind, frozen=True, kw_only=True, tag="Bucketing", tag_field="kind"):
    """Rows are drawn into buckets of s without putting back; their means take the rows' place.

    The last bucket may hold fewer. A hostile row spoils one bucket, so that f stays; buckets of
    workers with unlike data are more alike than these. All workers draw the same.

    Source: Karimireddy et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing", algorithm 1.

    Attributes:
        s: Rows of a bucket.
        seed: Of the draws; each aggregate has its own.
    """

    s: Annotated[int, msgspec.Meta(ge=1)] = 2
    seed: int = 0

    def rows(self, n: int) -> int:
        """Buckets."""
        return -(-n // self.s)

    def init(self) -> dict[str, Any]:
        """Aggregates so far."""
        return {"count": 0}

    def mixing(self, points: Points, f: int, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """One over the bucket's size, for each row that is in it."""
        import numpy as np

        drawn = np.random.default_rng([self.seed % (1 << 64), state["count"]])
        order = drawn.permutation(points.n)
        weights = np.zeros((self.rows(points.n), points.n + 2))
        for bucket, start in enumerate(range(0, points.n, self.s)):
            members = order[start : start + self.s]
            weights[bucket, members] = 1 / len(members)
        return weights, {"count": state["count"] + 1}
