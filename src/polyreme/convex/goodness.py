"""How good a partition of the rows is: how far workers' own problems lead from the common one.

With a as the anchor, worker k minimises P_k(w; a) = F_k(w) + (grad F(a) - grad F_k(a)) w + R(w).
The gap l(a) = P(w*) - 1/K sum_k min_w P_k(w; a) is 0 at the optimum w* and above elsewhere; the
smaller the largest l(a) / |a - w*|^2, the fewer rounds pSCOPE takes.

Source: Zhao et al. 2018, "Proximal SCOPE for Distributed Sparse Learning", definitions 2 to 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..algo.task import Here, Steps, Task
from .choice import smoothness
from .problem import residual
from .shard import Shard
from .steps import walked

if TYPE_CHECKING:
    import torch

_PASSES = 200
_DONE = 1e-9
_RADII = (1e-2, 1e-1, 1.0)


@dataclass(frozen=True, kw_only=True)
class Goodness:
    """The largest l(a) / |a - w*|^2 that was seen, and the distance |a - w*| where it was."""

    constant: float
    distance: float


def goodness(
    shards: Sequence[Shard],
    optimum: np.ndarray,
    *,
    directions: int = 4,
    radii: Sequence[float] = _RADII,
    seed: int = 0,
) -> Goodness:
    """The constant of a partition, from below: over a number of anchors, 0 among them.

    `optimum` [D] minimises the problem of all shards together. Anchors lie at `radii` times its
    norm (of 1, if it is 0) from it, in directions at random and towards 0.
    """
    rng = np.random.default_rng(seed)
    size = float(np.linalg.norm(optimum)) or 1.0
    least = _objective(shards, optimum)
    ways = [-optimum / size, *rng.normal(size=(directions, len(optimum)))]
    best = Goodness(constant=0.0, distance=0.0)
    for way in ways:
        length = float(np.linalg.norm(way))
        for radius in radii if length else ():
            anchor = optimum + radius * size * way / length
            distance = radius * size
            found = gap_at(shards, least, anchor) / distance**2
            if found > best.constant:
                best = Goodness(constant=found, distance=distance)
    return best


def gap_at(shards: Sequence[Shard], least: float, anchor: np.ndarray) -> float:
    """l(a), where the least of the common objective is known."""
    here = [shard.at(anchor) for shard in shards]
    n = sum(len(shard) for shard in shards)
    z = sum((each.gradient for each in here), np.zeros_like(anchor)) / n
    own = [
        _least(shard, anchor, z - each.gradient / len(shard))
        for shard, each in zip(shards, here, strict=True)
    ]
    return least - sum(own) / len(own)


def fallen(
    task: Task,
    w: torch.Tensor,
    at_w: Here,
    tilt: torch.Tensor,
    *,
    eta: float,
    seed: Sequence[int],
) -> float:
    """A bound from above of min_u P_k(u; a) times the worker's samples, from one pass of steps.

    It is P_k at `w`, or where steps from there lead if that is lower. `tilt` is
    grad F(a) - grad F_k(a).
    """
    n = task.n_own
    b = at_w.gradient / n + tilt
    u = task.steps(Steps(start=w, slopes=at_w.slopes, b=b, n=n, eta=eta, seed=seed))
    here = at_w.loss / n + float(tilt @ w) + task.penalty(w)
    there = task.loss(u) / n + float(tilt @ u) + task.penalty(u)
    return n * (there if there < here else here)


def _objective(shards: Sequence[Shard], w: np.ndarray) -> float:
    n = sum(len(shard) for shard in shards)
    return sum(shard.loss(w) for shard in shards) / n + shards[0].objective.penalty.value(w)


def _least(shard: Shard, start: np.ndarray, tilt: np.ndarray) -> float:
    """min_w of a shard's objective plus tilt w, by passes of variance-reduced steps."""
    n, penalty, w = len(shard), shard.objective.penalty, start
    eta = 0.5 / smoothness(shard)
    for number in range(_PASSES):
        here = shard.at(w)
        b = here.gradient / n + tilt
        if residual(penalty, w, b) < _DONE:
            break
        order = np.random.default_rng((number, n)).integers(0, n, 2 * n)
        w = walked(shard, w, here.slopes, b, order, eta)
    return shard.loss(w) / n + float(tilt @ w) + penalty.value(w)
