"""A torus."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ....errors import Violation
from ..torus import most_square, rows_violation
from .kind import GraphKind


class TorusGraph(GraphKind, frozen=True, kw_only=True, tag="Torus", tag_field="kind"):
    """Each worker with those beside, above and below it.

    Source: Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip
    Algorithms with Compressed Communication".

    Attributes:
        rows: Rows of the torus, which must divide the number of workers; as near to a square as
            it goes, unless given.
    """

    rows: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def neighbours(self, n: int, step: int, seed: int) -> list[set[int]]:
        """Those beside, above and below, each once."""
        rows = self.rows or most_square(n)
        columns = n // rows
        near = []
        for i in range(n):
            row, column = divmod(i, columns)
            beside = {row * columns + (column + way) % columns for way in (-1, 1)}
            above = {(row + way) % rows * columns + column for way in (-1, 1)}
            near.append((beside | above) - {i})
        return near

    def refused(self, n: int, *, columns_only: bool = False) -> list[Violation]:
        """Rows must be full."""
        return rows_violation(n, self.rows, "data_parallel.topology.graph.rows")
