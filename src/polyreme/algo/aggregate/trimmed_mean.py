"""The mean of each entry without the extreme ones."""

from __future__ import annotations

from typing import ClassVar

from .ordered import Order
from .robust import RobustKind


class TrimmedMean(RobustKind, frozen=True, kw_only=True, tag="TrimmedMean", tag_field="kind"):
    """The mean of each entry over the rows without its f smallest and its f largest values.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", definition 2.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
    """

    geometric: ClassVar[bool] = False

    exact: ClassVar[bool] = True
    epsilon_source: ClassVar[str] = "f entries at one value, the others at another"
    time: ClassVar[str] = "n log(n)^2 d"
    memory: ClassVar[str] = "blocks"
    assumes: ClassVar[str] = "f known: of honest rows 2 f are left out at each entry"

    def epsilon(self, n: int) -> float:
        """The least that there is."""
        return self.byzantine / (n - self.byzantine)

    def order(self, n: int, f: int) -> Order | None:
        """All but the extreme ones."""
        return Order(places=range(f, n - f))
