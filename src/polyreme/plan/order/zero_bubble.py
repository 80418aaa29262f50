"""1F1B with the backward pass in halves: weights wait, and fill what would be idle."""

from __future__ import annotations

from typing import ClassVar

from ..ir import ActionKind
from ..play import Costs
from .kind import Order, Ranks, passes


class ZBH1(Order):
    """Halves of backward passes with the memory of 1F1B."""

    name: ClassVar[str] = "zb-h1"
    source: ClassVar[str] = "Qi et al. 2023, handcrafted schedule 1"
    line: ClassVar[str] = "1F1B whose weight halves wait: a third of its bubble, no more memory."
    bubble: ClassVar[str] = "(p-1)(F+I-W)"
    peak: ClassVar[str] = "p"

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """As many on each stage: where fewer are ahead, more weights wait."""
        return min(n_ranks, n_microbatches)

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """M (F + I + W) + (p - 1)(F + I - W) where W is the least, for m >= p."""
        if n_microbatches < n_ranks:
            return None
        stages = list(zip(costs.forward, costs.inputs, costs.weights, strict=True))
        most = max(stages, key=sum)
        bubbles = [each[0] + each[1] - min(each) for each in stages]
        return n_microbatches * sum(most) + sum(bubbles) - bubbles[stages.index(most)]

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """On rank s, W of a microbatch follows I of the one s later."""
        return tuple(
            passes(rank, _turns(n_ranks - rank, rank, n_microbatches)) for rank in range(n_ranks)
        )


class ZBH2(Order):
    """More forward passes ahead, until nothing is idle."""

    name: ClassVar[str] = "zb-h2"
    source: ClassVar[str] = "Qi et al. 2023, handcrafted schedule 2"
    line: ClassVar[str] = "No bubble where F = I = W, for twice the memory of 1F1B."
    bubble: ClassVar[str] = "(p-1)(F+I-2W)"
    peak: ClassVar[str] = "2p - 1"

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """As many on each stage."""
        return min(2 * n_ranks - 1, n_microbatches)

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """M (F + I + W) + (p - 1) max(F, F + I - 2 W), for m >= 2 p - 1.

        The last rank is idle for p - 1 forward passes before its first; none is after its own.
        """
        if n_microbatches < 2 * n_ranks - 1:
            return None
        stages = list(zip(costs.forward, costs.inputs, costs.weights, strict=True))
        most = max(stages, key=sum)
        bubbles = [max(each[0], each[0] + each[1] - 2 * each[2]) for each in stages]
        return n_microbatches * sum(most) + sum(bubbles) - bubbles[stages.index(most)]

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """2p - 1 - 2s forward passes ahead on rank s, and weights 2s late."""
        return tuple(
            passes(rank, _turns(2 * (n_ranks - rank) - 1, 2 * rank, n_microbatches))
            for rank in range(n_ranks)
        )


def _turns(n_ahead: int, late: int, n_microbatches: int) -> list[tuple[ActionKind, int]]:
    """Forward passes ahead, then I and F in turn; W `late` microbatches after its I."""
    found: list[tuple[ActionKind, int]] = [("F", m) for m in range(min(n_ahead, n_microbatches))]
    for m in range(n_microbatches):
        found.append(("I", m))
        if m >= late:
            found.append(("W", m - late))
        if m + n_ahead < n_microbatches:
            found.append(("F", m + n_ahead))
    return found + [("W", m) for m in range(max(n_microbatches - late, 0), n_microbatches)]
