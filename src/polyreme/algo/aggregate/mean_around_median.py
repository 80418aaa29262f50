"""The mean of the values of each entry that are nearest to its median."""

from __future__ import annotations

from typing import ClassVar

from .ordered import Order, middle
from .robust import RobustKind


class MeanAroundMedian(
    RobustKind, frozen=True, kw_only=True, tag="MeanAroundMedian", tag_field="kind"
):
    """The mean of the n - f values of each entry that are nearest to its median (Meamed).

    Source: Xie et al. 2018, "Generalized Byzantine-tolerant SGD", definition 8.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
    """

    geometric: ClassVar[bool] = False

    exact: ClassVar[bool] = True
    time: ClassVar[str] = "n log(n)^2 d"
    memory: ClassVar[str] = "blocks"
    assumes: ClassVar[str] = "f known; entries about which honest rows agree"

    def epsilon(self, n: int) -> float:
        """The least that there is."""
        return self.byzantine / (n - self.byzantine)

    def order(self, n: int, f: int) -> Order | None:
        """Those near the median."""
        return Order(places=middle(n), keep=n - f)
