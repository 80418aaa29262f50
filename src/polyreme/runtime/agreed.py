"""The vector in which processes tell each other, at the end of a step, what all must know."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a rank tells all others at the end of a step, in numbers that float64 holds exactly.

    `stop` is its wish to end the run, `save` the state of its part of a checkpoint under way.
    """

    stop: bool = False
    save: int = 0


class Own(NamedTuple):
    """One rank's row of the end-of-step vector, known to its host."""

    stop: float
    save: float
    trail: float
    compute_s: float
    hidden_s: float
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """The end-of-step vector after its all-reduce."""

    loss_sum: float
    weight: float
    square_sum: float
    bad_loss: tuple[bool, ...]
    bad_gradient: tuple[bool, ...]
    own: tuple[Own, ...]
    used: tuple[bool, ...]

    @property
    def said(self) -> tuple[Said, ...]:
        """What each rank told."""
        return tuple(Said(stop=own.stop > 0, save=int(own.save)) for own in self.own)

    @staticmethod
    def read(values: list[float], n_ranks: int) -> Agreed:
        """What so many ranks have put into it."""
        rest = iter(values)
        loss_sum, weight, square_sum = islice(rest, 3)
        bad = [flag > 0 for flag in islice(rest, 2 * n_ranks)]
        return Agreed(
            loss_sum=loss_sum,
            weight=weight,
            square_sum=square_sum,
            bad_loss=tuple(bad[::2]),
            bad_gradient=tuple(bad[1::2]),
            own=tuple(Own(*islice(rest, len(Own._fields))) for _ in range(n_ranks)),
            used=tuple(flag > 0 for flag in rest),
        )
