"""Step sizes from the data: their smoothness, and a line search on a few of a worker's samples.

Rounds are played on the few as a worker alone would play them, but with as many steps as a round
has on all of its samples: how large steps may be depends on how many follow one gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .task import Here, Steps, Sum

if TYPE_CHECKING:
    import torch

FEW = 2000  # samples that rounds are tried on
FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of 1/L, the step sizes that are tried
ROUNDS = 6
_FAR = 1e150  # squares of what is farther overflow


class Walk(Protocol):
    """The steps that a round asks for, around a model w with the whole gradient z."""

    def __call__(
        self,
        w: torch.Tensor,
        z: torch.Tensor,
        here: Here,
        *,
        n: int,
        eta: float,
        seed: Sequence[int],
    ) -> Steps:
        """So many, of this size."""


def plain(exact: bool, mu: float) -> Walk:
    """Steps from the anchor, see `task.Steps`."""

    def walk(
        w: torch.Tensor,
        z: torch.Tensor,
        here: Here,
        *,
        n: int,
        eta: float,
        seed: Sequence[int],
    ) -> Steps:
        slopes = here.slopes
        return Steps(start=w, slopes=slopes, b=z, n=n, eta=eta, seed=seed, mu=mu, exact=exact)

    return walk


def came_to(few: Sum, w: torch.Tensor, walk: Walk, eta: float, n: int, rounds: int) -> float:
    """The objective on few samples after rounds of n steps each; infinite where it is not finite.

    0 where there are none.
    """
    if not few.n_own:
        return 0.0
    for number in range(rounds):
        here = few.at(w)
        seed = number, few.n_own
        asked = walk(w, here.gradient / few.n_own, here, n=n, eta=eta, seed=seed)
        w = few.nearest(few.steps(asked))
        if not bool((w.abs() < _FAR).all()):
            return math.inf
    found = few.loss(w) / few.n_own + few.penalty(w)
    return found if math.isfinite(found) else math.inf


def first_eta(
    task: Sum, w: torch.Tensor, walk: Walk, mu: float, n: int | None = None, rounds: int = ROUNDS
) -> float:
    """The multiple of 1/L, up to 1/mu, whose rounds of n steps come to the lowest objective.

    L is the largest curvature of a sample. Rounds have as many steps as there are few samples,
    unless n is given. Samples that are 0, or none, ask for nothing: 1 then.
    """
    curvature = task.smoothness(w)
    if not curvature:
        return 1.0 / (1.0 + mu)
    few = task.few(FEW)
    etas = [min(factor / curvature, 1.0 / (mu + 1e-300)) for factor in FACTORS]
    ends = [came_to(few, w, walk, eta, n or few.n_own, rounds) for eta in etas]
    least = min(ends)
    return etas[ends.index(least)] if math.isfinite(least) else 1.0 / (curvature + mu)
