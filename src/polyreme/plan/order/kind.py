"""What every order of a pipeline is: where its stages lie, and what each rank plays when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ...errors import undefined
from ..ir import Action, ActionKind
from ..play import Costs

Ranks = tuple[tuple[Action, ...], ...]


class Order:
    """One kind of order. A new one is one file with a class of this form.

    `bubble` and `peak` say in words what the source promises for equal stages. `chunks` is how
    many stages a rank holds of one copy of the model, `copies` how many copies lie on the ranks.
    `slices` is into how many slices of tokens a microbatch is cut.
    A `synchronous` order trains as one device would: one update, after all microbatches. The
    actions of one `by_costs` are other ones for stages that take other times.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    line: ClassVar[str]
    bubble: ClassVar[str]
    peak: ClassVar[str]
    chunks: ClassVar[int] = 1
    copies: ClassVar[int] = 1
    synchronous: ClassVar[bool] = True
    by_costs: ClassVar[bool] = False
    slices: int = 1

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """The rank of the pipeline that holds a stage: here in rounds."""
        return stage % n_ranks

    def placements(self, n_ranks: int) -> tuple[tuple[int, ...], ...]:
        """Of each stage, the rank of each copy."""
        return tuple(
            tuple(self.rank(stage, n_ranks, copy) for copy in range(self.copies))
            for stage in range(n_ranks * self.chunks)
        )

    def weights(self, rank: int, n_ranks: int) -> int:
        """How many times a rank keeps the parameters of its share of the stages."""
        return self.copies

    def refused(self, n_ranks: int, n_microbatches: int) -> str | None:
        """Why there is no such order, where there is none."""
        return None

    def in_flight(self, stage: int, n_ranks: int, n_microbatches: int) -> int | None:
        """The most microbatches of a stage forward and not yet backward; None: play it."""
        return None

    def closed_form_s(self, n_ranks: int, n_microbatches: int, costs: Costs) -> float | None:
        """The makespan without playing it; None where the source has no form for it.

        It holds for stages that are alike and sends that take no time. For others it is what a
        search may go by before it plays what it found.
        """
        return None

    def cut(self, n_slices: int) -> Order:
        """The same over so many slices of tokens, where it has slices."""
        return self

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Each rank's passes over microbatches 0 to n - 1, without the update.

        `costs` are of the n_ranks x chunks stages. An order that is not synchronous has its
        updates among them.
        """
        raise undefined(self, "actions")


def passes(stage: int, kinds: Iterable[tuple[ActionKind, int]]) -> tuple[Action, ...]:
    """Actions of one stage, given as kind and microbatch."""
    return tuple(Action(stage=stage, kind=kind, microbatch=each) for kind, each in kinds)


def plan_order(order: Order, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
    """What each rank plays in a step: its passes, then one update of each stage that it holds."""
    assert order.refused(n_ranks, n_microbatches) is None, "there is no such order"
    return with_updates(order, n_ranks, order.actions(n_ranks, n_microbatches, costs))


def with_updates(order: Order, n_ranks: int, ranks: Ranks) -> Ranks:
    """The passes of each rank, then one update of each stage that it holds.

    An order that is not synchronous has its updates already.
    """
    if not order.synchronous:
        return ranks
    updates: list[list[Action]] = [[] for _ in ranks]
    for stage, held in enumerate(order.placements(n_ranks)):
        for copy, rank in enumerate(held):
            updates[rank].append(Action(stage=stage, kind="U", copy=copy))
    return tuple((*own, *last) for own, last in zip(ranks, updates, strict=True))


def bottleneck_s(costs: Costs, n_microbatches: int) -> float:
    """All microbatches through the slowest stage, the first and last through the others once."""
    stages_s = [sum(each) for each in zip(costs.forward, costs.inputs, costs.weights, strict=True)]
    return sum(stages_s) + (n_microbatches - 1) * max(stages_s)


def steady(microbatches: int, pp: int) -> int:
    """As many microbatches as it takes until orders repeat what they do for more of them."""
    start, period = 6 * pp, 2 * pp
    if microbatches <= start + period:
        return microbatches
    return start + (microbatches - start) % period
