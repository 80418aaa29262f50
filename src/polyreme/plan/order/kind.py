"""What every order of a pipeline is: where its stages lie, and what each rank plays when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from ..ir import Action, ActionKind
from ..play import Costs

Ranks = tuple[tuple[Action, ...], ...]


class Order:
    """One kind of order. A new one is one file with a class of this form.

    `bubble` and `peak` say in words what the source promises for equal stages.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    line: ClassVar[str]
    bubble: ClassVar[str]
    peak: ClassVar[str]
    chunks: ClassVar[int] = 1

    def rank(self, stage: int, n_ranks: int, copy: int = 0) -> int:
        """The rank of the pipeline that holds a stage: here in rounds."""
        return stage % n_ranks

    def refused(self, n_ranks: int, n_microbatches: int) -> str | None:
        """Why there is no such order, where there is none."""
        return None

    def actions(self, n_ranks: int, n_microbatches: int, costs: Costs) -> Ranks:
        """Each rank's passes over microbatches 0 to n - 1, without the update.

        `costs` are of the n_ranks x chunks stages.
        """
        raise NotImplementedError


def passes(stage: int, kinds: Iterable[tuple[ActionKind, int]]) -> tuple[Action, ...]:
    """Actions of one stage, given as kind and microbatch."""
    return tuple(Action(stage=stage, kind=kind, microbatch=each) for kind, each in kinds)
