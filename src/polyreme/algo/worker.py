"""Who plays an algorithm's program: one worker among others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .attack import Attack
from .draw import Draw
from .goal import Goal
from .task import Task
from .vector import Layout


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One worker: its number of all, its vector's layout, and what all share.

    `lr` gives the learning rate of a step, `clip_norm` bounds the norm of a gradient that the rule
    is given; `n_samples` are those of the worker's own data (0: all workers share one order).
    Rounds of several steps end at `n_steps`. `attack` says who is hostile, and what they do.
    `task` is what can be asked of its samples where the model is linear; a round that finds `goal`
    met leaves the model as it is.
    """

    rank: int
    n: int
    layout: Layout
    seed: int
    lr: Callable[[int], float]
    clip_norm: float | None = None
    n_samples: int = 0
    n_steps: int | None = None
    attack: tuple[Attack, ...] = ()
    task: Task | None = None
    goal: Goal = field(default_factory=Goal)

    def draw(self, step: int) -> Draw:
        """Random numbers of a step."""
        return Draw(seed=self.seed, worker=self.rank, step=step)
