"""A worker's own problem: its samples' loss beside what ties it to the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..effects import Local, Program
from ..task import Here, Steps, Task

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Near:
    """F(u) + pull u + mu/2 |u|^2, and R(u) if `exact`; F is the mean loss of a worker's samples.

    It is solved by so many `anchors`: each has a gradient of F, and `passes` over the samples of
    variance-reduced steps that follow it.
    """

    pull: torch.Tensor
    mu: float
    exact: bool
    anchors: int
    passes: float

    def value(self, task: Task, u: torch.Tensor, here: Here) -> float:
        """Of the problem at u."""
        found = here.loss / max(1, task.n_own) + float(self.pull @ u) + self.mu / 2 * float(u @ u)
        return found + task.penalty(u) if self.exact else found


@dataclass(frozen=True, kw_only=True)
class Came:
    """The model that was come to, the step size by then, and the summed loss there."""

    u: torch.Tensor
    eta: float
    loss: float


def come(
    task: Task,
    near: Near,
    start: torch.Tensor,
    eta: float,
    seed: Sequence[int],
    here: Here | None = None,
) -> Program[Came]:
    """Go down from `start`, where `here` is; what leads up is gone back on, with half the step.

    Source: Johnson and Zhang 2013, "Accelerating Stochastic Gradient Descent using Predictive
    Variance Reduction", with the prox of Xiao and Zhang 2014.
    """
    n, whole = max(1, task.n_own), task.batches(task.n_own)
    if here is None:
        here = yield Local(work=partial(task.at, start), batches=whole)
    most = 0.5 / near.mu if near.mu else math.inf
    u, value = start, near.value(task, start, here)
    for anchor in range(near.anchors):
        asked = Steps(
            start=u,
            slopes=here.slopes,
            b=here.gradient / n + near.pull,
            n=math.ceil(near.passes * task.n_own),
            eta=min(eta, most),
            seed=(*seed, anchor),
            mu=near.mu,
            exact=near.exact,
        )
        gone = yield Local(work=partial(task.steps, asked), batches=task.batches(asked.n))
        there = yield Local(work=partial(task.at, gone), batches=whole)
        reached = near.value(task, gone, there)
        if reached <= value + 1e-12 * abs(value):
            u, here, value = gone, there, reached
        else:
            eta = min(eta, most) / 2
    return Came(u=u, eta=eta, loss=here.loss)
