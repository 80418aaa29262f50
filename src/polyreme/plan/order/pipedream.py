"""1F1B without a flush: each microbatch updates each stage as soon as it is back there."""

from __future__ import annotations

from typing import ClassVar

from ..ir import Action
from ..play import Costs
from .kind import Order, Ranks, bottleneck_s


class PipeDream(Order):
    """Forward passes read the newest weights, backward passes those of their forward pass.

    Differs: the microbatches of a step still drain before the next step begins, so that a step
    can be saved. The more microbatches a step has, the less that costs.
    """

    name: ClassVar[str] = "pipedream"
    source: ClassVar[str] = "Narayanan et al. 2019, weight stashing"
    line: ClassVar[str] = (
        "An update after each backward pass, on weights kept for those on the way."
    )
    bubble: ClassVar[str] = "(p-1)(F+B)"
    peak: ClassVar[str] = "p - rank, and as many versions of the weights"
    synchronous: ClassVar[bool] = False

    def weights(self, rank: int, n_ranks: int) -> int:
        """A version for each microbatch on the way."""
        return n_ranks - rank

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """One for each stage from here to the last."""
        return min(n_ranks - stage, n_microbatches)

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """That of 1F1B."""
        return bottleneck_s(costs, n_microbatches)

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Version v of a stage's weights is made by its v-th update."""
        return tuple(_turns(rank, n_ranks - rank, n_microbatches) for rank in range(n_ranks))


def _turns(stage: int, n_ahead: int, n_microbatches: int) -> tuple[Action, ...]:
    """1F1B; a forward pass of microbatch m comes after m + 1 - n_ahead updates."""
    read = [max(m + 1 - n_ahead, 0) for m in range(n_microbatches)]

    def forward(m: int) -> Action:
        return Action(stage=stage, kind="F", microbatch=m, weight_version=read[m])

    found = [forward(m) for m in range(min(n_ahead, n_microbatches))]
    for m in range(n_microbatches):
        found.append(Action(stage=stage, kind="B", microbatch=m, weight_version=read[m]))
        found.append(Action(stage=stage, kind="U", microbatch=m, weight_version=m + 1))
        if m + n_ahead < n_microbatches:
            found.append(forward(m + n_ahead))
    return tuple(found)
