"""What every attack has: who is hostile, and what they send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ...errors import Violation, undefined

if TYPE_CHECKING:
    import torch

    from ..draw import Draw
    from ..effects import Split

State = dict[str, Any]
Made = tuple["torch.Tensor", State]
Rank = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What those that see the others aim at.

    `n` workers run; `draw` is the same on all of them. `aggregate` is what comes out once all
    workers of the attack send that vector.
    """

    n: int
    draw: Draw
    aggregate: Callable[[torch.Tensor], Split[torch.Tensor]]


class AttackKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attack is what hostile workers send instead of what the algorithm has them send.

    They take part in all else, and tell of their batches what is so. One that does not see the
    others has `sent`, played by each hostile worker on its own vector, with a state of its own.
    One that `sees` has `made`, played where the aggregate is made: one vector for all its workers.

    Attributes:
        workers: Who is hostile, counted from 0.
    """

    sees: ClassVar[bool] = False
    """Whether it needs what the other workers send in the same step."""
    whole: ClassVar[bool] = False
    """Whether it needs vectors whole, and not the share of them that one server has."""
    is_silent: ClassVar[bool] = False
    """Whether hostile workers send nothing."""
    of_batches: ClassVar[bool] = False
    """Whether it is in what hostile workers compute, and nothing else."""

    workers: Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, examples=[[7]])]

    def refused(self, n: int, path: str) -> list[Violation]:
        """What is wrong for n workers; `path` is where the attack stands in the spec."""
        return [*self._workers(n, path)]

    def _workers(self, n: int, path: str) -> Iterator[Violation]:
        for at, worker in enumerate(self.workers):
            below = f"{path}.workers[{at}]"
            if worker >= n:
                rule = f"is not among the {n} workers, which are counted from 0"
                legal = f"{n - 1} (or any integer >= 0 and <= {n - 1})"
                yield Violation(path=below, value=worker, rule=rule, legal=legal)
            elif worker in self.workers[:at]:
                rule = "is named already"
                yield Violation(path=below, value=worker, rule=rule, legal="leave it out")

    def init(self, like: torch.Tensor, n: int) -> State:
        """State before the first step, of n workers."""
        return {}

    def sent(self, vector: torch.Tensor, state: State, draw: Draw) -> Made | Split[Made]:
        """What a hostile worker sends where that vector was meant, and its next state."""
        raise undefined(self, "sent")

    def made(
        self, honest: Mapping[int, torch.Tensor], state: State, aim: Aim
    ) -> Made | Split[Made]:
        """What all hostile workers send, where the honest ones send these; the next state.

        Vectors are as the aggregate is given them. Where a replica is split they are its shares.
        """
        raise undefined(self, "made")

    def labelled(self, labels: torch.Tensor, n_classes: int) -> torch.Tensor:
        """The labels that a hostile worker trains on where these were meant."""
        return labels
