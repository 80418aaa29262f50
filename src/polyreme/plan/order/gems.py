"""Two copies of the model from either end, one microbatch at a time: the least memory."""

from __future__ import annotations

from typing import ClassVar

from ..ir import Action, ActionKind
from ..play import Costs
from .kind import Order, Ranks


class Gems(Order):
    """A microbatch down, the next one up behind its backward pass."""

    name: ClassVar[str] = "gems"
    source: ClassVar[str] = "Jain et al. 2020"
    line: ClassVar[str] = "Two copies in opposite directions that take turns: one microbatch alive."
    bubble: ClassVar[str] = "share (p-1)/(p+1/2) where B = 2F"
    peak: ClassVar[str] = "1"
    copies: ClassVar[int] = 2

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """The second copy lies the other way."""
        return n_ranks - 1 - stage if copy else stage

    def refused(self, n_ranks: int, n_microbatches: int) -> str | None:
        """No rank holds a stage twice."""
        return f"{n_ranks} ranks are not even" if n_ranks % 2 else None

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """One of either copy, on different ranks."""
        return min(2, n_microbatches)

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """The first microbatch's way and then for each one B and p - 1 of the longer pass, and F.

        Where stages differ, p - 1 times is all stages but one.
        """
        forward = costs.forward
        backward = [sum(each) for each in zip(costs.inputs, costs.weights, strict=True)]
        longer = [max(each) for each in zip(forward, backward, strict=True)]
        turn_s = sum(longer) - max(longer) + max(map(sum, zip(forward, backward, strict=True)))
        return sum(forward) + (n_microbatches - 1) * turn_s + sum(backward)

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Each rank plays F and B of each microbatch, whatever its direction, one after another."""
        kinds: tuple[ActionKind, ...] = ("F", "B")
        return tuple(
            tuple(
                Action(
                    stage=self.rank(rank, n_ranks, microbatch % 2),
                    kind=kind,
                    microbatch=microbatch,
                    copy=microbatch % 2,
                )
                for microbatch in range(n_microbatches)
                for kind in kinds
            )
            for rank in range(n_ranks)
        )
