"""As many forward passes as there are stages left, then one backward and one forward in turn."""

from __future__ import annotations

from typing import ClassVar

from ..ir import ActionKind
from ..play import Costs
from .kind import Order, Ranks, bottleneck_s, passes


class OneFOneB(Order):
    """One forward, one backward."""

    name: ClassVar[str] = "1f1b"
    source: ClassVar[str] = "PipeDream-flush, Narayanan et al. 2021"
    line: ClassVar[str] = "One forward, one backward in turn: what is alive is bounded by p."
    bubble: ClassVar[str] = "(p-1)(F+B)"
    peak: ClassVar[str] = "p - rank"

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """One for each stage from here to the last."""
        return min(n_ranks - stage, n_microbatches)

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """(m + p - 1)(F + B), and 2 (p - 1)(1 + (m - 1) / p) sends; of these at most two too many.

        Each microbatch is sent 2 (p - 1) times on its way, and the first rank has p under way.
        """
        n_sends = 2 * (n_ranks - 1) * (1 + (n_microbatches - 1) / n_ranks)
        return bottleneck_s(costs, n_microbatches) + n_sends * costs.send

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Warm-up of p - rank microbatches, turns, then the rest backward."""
        return tuple(
            passes(rank, _turns(n_ranks - rank, n_microbatches)) for rank in range(n_ranks)
        )


def _turns(n_ahead: int, n_microbatches: int) -> list[tuple[ActionKind, int]]:
    found: list[tuple[ActionKind, int]] = [("F", m) for m in range(min(n_ahead, n_microbatches))]
    for m in range(n_microbatches):
        found.append(("B", m))
        if m + n_ahead < n_microbatches:
            found.append(("F", m + n_ahead))
    return found
