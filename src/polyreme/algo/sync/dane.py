"""DANE: workers solve problems of their own that have the whole gradient; models are averaged."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..effects import Local, Program
from ..search import first_eta, plain
from .finite_sum import FiniteSum, Found
from .kind import State
from .near import Near, come

if TYPE_CHECKING:
    import torch

    from ..worker import Worker

_Rate = Annotated[float, msgspec.Meta(gt=0)]
_FIRST = 0.01  # of the samples' curvature: the pull after the first round that led up
_MORE = 4.0


class DANE(FiniteSum, frozen=True, kw_only=True, tag="DANE", tag_field="kind"):
    """Each worker minimises its own loss, corrected by the whole gradient; models are averaged.

    Worker k has F_k, and all know z = grad F(w). It takes u_k near the least of
    F_k(u) + (z - grad F_k(w)) u + mu/2 |u - w|^2 + R(u); the next w is the mean of all u_k.

    Source: Shamir, Srebro and Zhang 2014, "Communication-Efficient Distributed Optimization using
    an Approximate Newton-type Method", figure 1, with eta = 1.
    Differs: R, if it is not smooth, stays in the worker's problem; that is solved to what some
    anchored passes come to; a round that leads up is gone back on, with four times the pull.

    Attributes:
        mu: Pull of a worker's model to the last common one; what it begins with.
        anchors: Gradients of its own samples that a worker takes in a round.
        passes: Steps after each of these, over the samples of a worker.
        eta: Step size; unless given, each worker searches for its own on some of its samples.
    """

    mu: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    anchors: Annotated[int, msgspec.Meta(ge=1)] = 4
    passes: _Rate = 2.0
    eta: _Rate | None = None

    @property
    def n_vectors(self) -> int:
        """The model before."""
        return 1

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """Own step size (0: not known yet), pull, and the model before with its objective."""
        return {
            "eta": self.eta or 0.0,
            "mu": self.mu,
            "before": params.clone(),
            "held": math.inf,
        }

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """The mean of workers' models; from the model before, if the last one was worse."""
        import torch

        task = me.task
        assert task is not None
        eta, mu, w, objective = state["eta"], state["mu"], found.w, found.certificate.objective
        if not eta:
            search = partial(first_eta, task, w, plain(True, mu), mu)
            eta = yield Local(work=search, batches=task.batches(min(task.n_own, 2000)) * 8)
        if not objective <= state["held"] + 1e-12 * abs(state["held"]):
            told = yield from self.least(eta)
            mu, w, objective = max(_MORE * mu, _FIRST / told), state["before"], state["held"]
            found = yield from self.found(w, me)
        near = Near(
            pull=found.z - found.here.gradient / max(1, task.n_own) - mu * w,
            mu=mu,
            exact=True,
            anchors=self.anchors,
            passes=self.passes,
        )
        seed = (me.seed, me.rank, state["step"])
        came = yield from come(task, near, w, eta, seed, found.here)
        (mean,) = yield from self.summed(came.u / me.n)
        mean = torch.where(torch.isfinite(mean), mean, math.inf)
        return mean, {"eta": came.eta, "mu": mu, "before": w, "held": objective}

    def rate(self, state: State, me: Worker) -> float:
        """The step size."""
        eta: float = state["eta"]
        return eta
