"""Rings of rows and rings of columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ...errors import Violation
from ..effects import Program
from ..packet import Message, applied
from .cost import Cost
from .kind import TopologyKind
from .passing import (
    all_gather,
    chunks,
    joined,
    parted,
    reduce_scatter,
    refilled,
    ring_gather,
    ring_sum,
    vector,
    whole,
)

if TYPE_CHECKING:
    from ..compose import DataParallel
    from ..worker import Worker


def divisors(n: int) -> list[int]:
    """All divisors, rising."""
    return [d for d in range(1, n + 1) if n % d == 0]


def most_square(n: int) -> int:
    """The largest divisor up to the root."""
    return max(d for d in divisors(n) if d <= math.isqrt(n))


def rows_violation(n: int, rows: int | None, path: str) -> list[Violation]:
    """A number of rows that n workers do not fill."""
    if rows is None or n % rows == 0:
        return []
    legal = ", ".join(map(str, divisors(n)))
    rule = f"does not divide the {n} workers"
    return [Violation(path=path, value=rows, rule=rule, legal=legal)]


class Torus2D(TopologyKind, frozen=True, kw_only=True, tag="Torus2D", tag_field="kind"):
    """Chunks are summed along rows, then along columns, and passed back along rows.

    Source: Mikami et al. 2018, "Massively Distributed SGD: ImageNet/ResNet-50 Training in a
    Flash".

    Attributes:
        rows: Rows of the torus, which must divide the number of workers; as near to a square as
            it goes, unless given.
    """

    rows: Annotated[int, msgspec.Meta(ge=1)] | None = None

    def refused(self, n: int, algorithm: DataParallel) -> list[Violation]:
        """Rows must be full."""
        return rows_violation(n, self.rows, "data_parallel.topology.rows")

    def _shape(self, n: int) -> tuple[int, int]:
        rows = self.rows or most_square(n)
        return rows, n // rows

    def _rings(self, n: int, rank: int) -> tuple[range, range]:
        """Workers of one's row, and of one's column."""
        columns = self._shape(n)[1]
        first = rank - rank % columns
        return range(first, first + columns), range(rank % columns, n, columns)

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Messages go round the row, those of a row round the column."""
        row, column = self._rings(me.n, me.rank)
        own = yield from ring_gather(message, [message.kinds] * len(row), row, me.rank)
        kinds = [message.kinds * len(row)] * len(column)
        bundles = yield from ring_gather(joined(own), kinds, column, me.rank)
        return applied(function, [each for bundle in bundles for each in parted(bundle, len(row))])

    def sum(self, message: Message, me: Worker) -> Program[Message]:
        """As rings do, one after another."""
        row, column = self._rings(me.n, me.rank)
        parts, at = chunks(vector(message), len(row)), row.index(me.rank)
        own = yield from reduce_scatter(parts, row, at)
        own = yield from ring_sum(own, column, me.rank)
        return refilled(message, whole((yield from all_gather(own, parts, row, at))))

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """Both rings'."""
        rows, columns = self._shape(n)
        if adds:
            along, across = 2 * (columns - 1), 2 * (rows - 1)
            one, two = along / columns * nbytes, across / rows * nbytes / columns
        else:
            along, across = columns - 1, rows - 1
            one, two = along * nbytes, across * columns * nbytes
        return Cost(along + across, one + two, along + across, max(one, two))
