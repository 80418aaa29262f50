"""OWL-QN: limited-memory quasi-Newton steps of the whole sum, each in one orthant."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..effects import Local, Program
from .finite_sum import FiniteSum, Found
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..task import Task
    from ..worker import Worker

_ENOUGH = 1e-4  # of the fall that the slope promises
_TRIES = 30
_NOISE = 1e-14  # of the objective: what rounding may add to it
_BENT = 1e-12  # of the lengths: the least product of a step and its change of the gradient


class OWLQN(FiniteSum, frozen=True, kw_only=True, tag="OWLQN", tag_field="kind"):
    """L-BFGS on loss and l2, with steps that leave no orthant where there is l1.

    The direction is had from the last steps and the gradients' changes, at the least subgradient;
    with l1, entries of it that do not go down are 0, and weights that would change their sign are
    0. The step is halved until the objective falls enough: each try is a pass over the samples and
    a sum of one number.

    Source: Andrew and Gao 2007, "Scalable Training of L1-Regularized Log-Linear Models", figure 2;
    without l1: Liu and Nocedal 1989, "On the Limited Memory BFGS Method for Large Scale
    Optimization", algorithm 2.1.
    Differs: without l1 too the line search is by halves; if it finds nothing, memory is begun anew.

    Attributes:
        memory: Steps that are remembered.
    """

    memory: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10

    by_feature: ClassVar[bool] = True

    @property
    def n_vectors(self) -> int:
        """Steps and gradients' changes that are remembered, the last step, the last gradient."""
        return 2 * self.memory + 2

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """The last steps and changes of the gradient, the latest at the end; how many there are."""
        rows = params.new_zeros(self.memory, len(params))
        return {
            "steps": rows,
            "changes": rows.clone(),
            "kept": 0,
            "last": params.new_zeros(len(params)),
            "gradient": params.new_zeros(len(params)),
            "rate": 0.0,
        }

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """The first try whose objective is low enough."""
        import torch

        task, w = me.task, found.w
        assert task is not None
        gradient = found.z + task.l2 * w
        kept = _remembered(state, gradient)
        least = _least(w, gradient, task.l1)
        way = -_turned(least, kept["steps"], kept["changes"], kept["kept"])
        if task.l1:
            way = torch.where(way * least < 0, way, 0.0)
        if not float(way @ least) < 0:
            way, kept["kept"] = -least, 0
        rate = 1.0 if kept["kept"] else min(1.0, 1 / max(1e-300, float(least.norm())))
        orthant = torch.where(w == 0, -least, w).sign()
        objective = found.certificate.objective
        for _ in range(_TRIES):
            u = w + rate * way
            if task.l1:
                u = torch.where(u * orthant > 0, u, 0.0)
            reached = yield from self.objective(u, found.n, task)
            fall = _ENOUGH * float(least @ (u - w))
            if reached <= objective + fall + _NOISE * abs(objective):
                return u, {**kept, "last": u - w, "gradient": gradient, "rate": rate}
            rate /= 2
        still = {"last": torch.zeros_like(w), "gradient": gradient, "rate": 0.0}
        return w, {**kept, **still, "kept": 0}

    def objective(self, u: torch.Tensor, n: float, task: Task) -> Program[float]:
        """P(u)."""
        loss = yield Local(work=partial(task.loss, u), batches=task.batches(task.n_own))
        (told,) = yield from self.summed(u.new_tensor([loss]))
        return float(told) / n + task.penalty(u)

    def rate(self, state: State, me: Worker) -> float:
        """The share of the step that was taken."""
        rate: float = state["rate"]
        return rate


def _remembered(state: State, gradient: torch.Tensor) -> State:
    """The memory with the last step, if the gradient rose along it."""
    import torch

    steps, changes, last = state["steps"], state["changes"], state["last"]
    kept, change = state["kept"], gradient - state["gradient"]
    if float(last @ change) > _BENT * float(last.norm() * change.norm()):
        steps = torch.cat([steps[1:], last[None]])
        changes = torch.cat([changes[1:], change[None]])
        kept = min(kept + 1, len(steps))
    return {"steps": steps, "changes": changes, "kept": kept}


def _least(w: torch.Tensor, gradient: torch.Tensor, l1: float) -> torch.Tensor:
    """The subgradient with the smallest entries."""
    import torch

    if not l1:
        return gradient
    at_zero = gradient.sign() * (gradient.abs() - l1).clamp(min=0.0)
    return torch.where(w == 0, at_zero, gradient + l1 * w.sign())


def _turned(g: torch.Tensor, steps: torch.Tensor, changes: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of the curvature that the last n steps saw, times g."""
    if not n:
        return g
    pairs = list(zip(steps[-n:], changes[-n:], strict=True))
    shares = []
    for step, change in reversed(pairs):
        share = float(step @ g) / float(step @ change)
        shares.append(share)
        g = g - share * change
    step, change = pairs[-1]
    g = g * (float(step @ change) / float(change @ change))
    for (step, change), share in zip(pairs, reversed(shares), strict=True):
        g = g + (share - float(change @ g) / float(step @ change)) * step
    return g
