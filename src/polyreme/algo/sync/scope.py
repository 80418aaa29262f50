"""SCOPE and pSCOPE: local variance-reduced steps around a common anchor."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from ..effects import Local, Program
from ..task import Steps
from .finite_sum import FiniteSum, Found
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..worker import Worker

_Rate = Annotated[float, msgspec.Meta(gt=0)]
_FELL = 0.3  # a round that leaves more of the gap than this is given twice the steps
_MOST_PASSES = 16
_NOISE = 1e-13  # of the objective: a gap that rounding may be


class Anchored(FiniteSum, frozen=True, kw_only=True):
    """Rounds of local steps around a model whose whole gradient all know; then models are averaged.

    A round whose outcome is above its beginning is gone back on, with half the step size.

    Attributes:
        eta: Step size; unless given, it is searched for on some of the samples.
        passes: Local steps of a round, over the samples of a worker; unless given, 1, and twice as
            many from each round on that leaves more than 0.3 of the gap, up to 16.
        send: What is averaged: where local steps end, or the mean of all models on the way.
    """

    eta: _Rate | None = None
    passes: _Rate | None = None
    send: Literal["last", "mean"] = "last"

    exact: ClassVar[bool] = True
    convex: ClassVar[bool] = False

    @property
    def n_vectors(self) -> int:
        """The anchor before."""
        return 1

    def pull(self, me: Worker) -> float:
        """Weight of what pulls a local model to the anchor, and to 0, other than by a prox."""
        return 0.0

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """The step size (0: not known yet), passes, and the anchor before with its objective."""
        return {
            "eta": self.eta or 0.0,
            "passes": self.passes or 1.0,
            "before": params.clone(),
            "held": math.inf,
            "gap": math.inf,
        }

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """Where local steps lead; or back, if the last ones led up."""
        import torch

        assert me.task is not None
        eta, passes, task = state["eta"], state["passes"], me.task
        if not eta:
            work = partial(task.first_eta, found.w, self.exact, self.pull(me))
            wish = yield Local(work=work, batches=task.batches(min(task.n_own, 2000)) * 8)
            eta = yield from self.least(wish)
        w, objective, gap = found.w, found.certificate.objective, found.certificate.gap
        if not objective <= state["held"] + 1e-12 * abs(state["held"]):
            eta, w, objective, gap = eta / 2, state["before"], state["held"], state["gap"]
            found = yield from self.found(w, me)
        elif self.passes is None and math.isfinite(state["gap"]):
            slow = gap > _FELL * state["gap"] and gap > _NOISE * abs(objective)
            passes = min(_MOST_PASSES, passes * 2) if slow else passes
        mu = self.pull(me)
        asked = Steps(
            start=w,
            anchor=w,
            slopes=found.here.slopes,
            b=found.z + self.offset(w, me),
            n=math.ceil(passes * task.n_own),
            eta=eta,
            seed=(me.seed, me.rank, state["step"]),
            mu=mu,
            exact=self.exact,
            mean=self.send == "mean",
        )
        after = yield from self.walked(asked, state["step"], me)
        after = torch.where(torch.isfinite(after), after, math.inf)
        kept = {"eta": eta, "passes": passes, "before": w, "held": objective, "gap": gap}
        return task.nearest(after), kept

    def walked(self, asked: Steps, step: int, me: Worker) -> Program[torch.Tensor]:
        """The mean of where all workers' steps lead."""
        task = me.task
        assert task is not None
        gone = yield Local(work=partial(task.steps, asked), batches=task.batches(asked.n))
        (mean,) = yield from self.summed(gone / me.n)
        return mean

    def offset(self, w: torch.Tensor, me: Worker) -> Any:
        """What is added to the gradient of the anchor beside `pull` times the model."""
        return 0.0

    def rate(self, state: State, me: Worker) -> float:
        """The step size."""
        eta: float = state["eta"]
        return eta


class PSCOPE(Anchored, frozen=True, kw_only=True, tag="pSCOPE", tag_field="kind"):
    """Local steps with a prox, so that sparse models stay so: any penalty.

    z = 1/n sum_i grad f_i(w). From u = w each worker takes steps, of a sample i of its own,
    u <- prox(u - eta (grad f_i(u) - grad f_i(w) + z)); the next w is the mean of all workers' u.

    Source: Zhao, Zhang, Li and Li 2018, "Proximal SCOPE for Distributed Sparse Learning",
    algorithm 1.

    Attributes:
        eta: Step size; unless given, it is searched for on some of the samples.
        passes: Local steps of a round, over the samples of a worker; unless given, 1, and twice as
            many from each round on that leaves more than 0.3 of the gap, up to 16.
        send: What is averaged: where local steps end, or the mean of all models on the way.
    """


class SCOPE(Anchored, frozen=True, kw_only=True, tag="SCOPE", tag_field="kind"):
    """Local steps that are pulled to the anchor, for penalties that are smooth: l2, or none.

    As pSCOPE, with u <- u - eta (grad f_i(u) - grad f_i(w) + z + c (u - w)), where the penalty is
    in f_i.

    Source: Zhao, Xiang, Shi, Gao and Li 2017, "SCOPE: Scalable Composite Optimization for Learning
    on Spark", algorithm 1. Workers count alike there too, however many samples they have.
    Differs: the step is searched for, and a round that leads up is gone back on.

    Attributes:
        eta: Step size; unless given, it is searched for on some of the samples.
        passes: Local steps of a round, over the samples of a worker; unless given, 1, and twice as
            many from each round on that leaves more than 0.3 of the gap, up to 16.
        send: What is averaged: where local steps end, or the mean of all models on the way.
        c: Pull to the anchor.
    """

    c: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    exact: ClassVar[bool] = False
    smooth: ClassVar[bool] = True

    def pull(self, me: Worker) -> float:
        """That of the anchor, and that of l2 to 0."""
        assert me.task is not None
        return self.c + me.task.l2

    def offset(self, w: torch.Tensor, me: Worker) -> Any:
        """The pull is to the anchor, not to 0."""
        return -self.c * w
