"""The median of each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from .ordered import Order, middle, weighted_median
from .robust import RobustKind

if TYPE_CHECKING:
    import torch


class CoordinateMedian(
    RobustKind, frozen=True, kw_only=True, tag="CoordinateMedian", tag_field="kind"
):
    """The median of each entry over the rows, of an even number the midpoint.

    Rows that count unlike have the point with half of the weight on either side, or the midpoint.

    Source: Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical
    Rates", definition 1.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
    """

    geometric: ClassVar[bool] = False
    takes_weights: ClassVar[bool] = True

    exact: ClassVar[bool] = True
    epsilon_source: ClassVar[str] = "as many entries as can be apart from the median, at one value"
    time: ClassVar[str] = "n log(n)^2 d"
    memory: ClassVar[str] = "blocks"
    assumes: ClassVar[str] = "entries about which honest rows agree, and that are not skewed"

    def epsilon(self, n: int) -> float:
        """Whatever f is."""
        return ((n - 1) // 2) / (n - (n - 1) // 2)

    def order(self, n: int, f: int) -> Order | None:
        """The middle."""
        return Order(places=middle(n))

    def entries(self, block: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Medians of rows that count unlike."""
        assert weights is not None, "rows alike have an order"
        return weighted_median(block, weights)
