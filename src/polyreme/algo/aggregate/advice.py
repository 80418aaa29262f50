"""What each robust aggregator guarantees for so many rows and hostile ones among them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from ..legal import tag
from . import Aggregator
from .robust import RobustKind


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One aggregator, with n rows of which f may be hostile.

    `refused` is the rule that forbids it there (None: it is legal). `epsilon` is the price of
    robustness: without attack the squared distance of the result from the mean is no more than so
    many times the mean squared distance of the rows from it (inf: there is no such number), and
    `exact` says that rows exist that reach it, `source` where it is from. `bound` is f / (n - f):
    nothing that bears f hostile rows can have less. `breakdown` is the largest f that it bears with
    n rows (None: it takes more rows than n). `time` and `memory` beyond rows and result are orders
    in n rows of d entries; blocks are of some entries of all rows.
    """

    kind: str
    refused: str | None
    epsilon: float
    exact: bool
    source: str
    bound: float
    breakdown: int | None
    time: str
    memory: str
    assumes: str


def advised(n: int, f: int) -> Iterator[Advice]:
    """Every robust aggregator with its options as they are by default; n >= 1, 0 <= f < n."""
    for kind in get_args(Aggregator):
        if issubclass(kind, RobustKind):
            yield of(kind(byzantine=f), n)


def of(aggregator: RobustKind, n: int) -> Advice:
    """One of them, as it is."""
    f = aggregator.byzantine
    refused, bound = aggregator.too_many(n, f), f / (n - f)
    known = refused is None and not aggregator.before
    epsilon = aggregator.epsilon(n) if known else float("inf")
    return Advice(
        kind=tag(aggregator),
        refused=refused,
        epsilon=epsilon,
        exact=aggregator.exact or epsilon == bound,
        source=aggregator.epsilon_source,
        bound=bound,
        breakdown=aggregator.most(n),
        time=aggregator.time,
        memory=aggregator.memory,
        assumes=aggregator.assumes,
    )
