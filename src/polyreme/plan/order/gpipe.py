"""All microbatches forward, then all backward."""

from __future__ import annotations

from typing import ClassVar

from ..play import Costs
from .kind import Order, Ranks, passes


class GPipe(Order):
    """All forward, then all backward."""

    name: ClassVar[str] = "gpipe"
    source: ClassVar[str] = "Huang et al. 2019"
    line: ClassVar[str] = "All microbatches forward, then all backward; the fewest surprises."
    bubble: ClassVar[str] = "(p-1)(F+B)"
    peak: ClassVar[str] = "m"

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """All."""
        return n_microbatches

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """Exact for unlike stages and sends too: each half is a flow shop."""
        backward = [sum(each) for each in zip(costs.inputs, costs.weights, strict=True)]
        slowest_s = max(costs.forward) + max(backward)
        ramp_s = sum(costs.forward) + sum(backward) + 2 * (n_ranks - 1) * costs.send
        return ramp_s + (n_microbatches - 1) * slowest_s

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Microbatches in the same order both ways."""
        all_of = range(n_microbatches)
        return tuple(
            passes(rank, [*(("F", m) for m in all_of), *(("B", m) for m in all_of)])
            for rank in range(n_ranks)
        )
