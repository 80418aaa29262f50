"""SCOPE and pSCOPE: local variance-reduced steps around a common anchor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from ..effects import Local, Program
from ..task import Steps
from . import longer
from .finite_sum import FiniteSum, Found
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..search import Walk
    from ..task import Here, Task
    from ..worker import Worker

_Rate = Annotated[float, msgspec.Meta(gt=0)]


class Anchored(FiniteSum, frozen=True, kw_only=True):
    """Rounds of local steps around a model whose whole gradient all know; then models are averaged.

    A round whose outcome is above its beginning is gone back on, with half the step size.

    Attributes:
        eta: Step size; unless given, it is searched for on some of the samples.
        passes: Local steps of a round, over the samples of a worker; unless given, they are
            searched for too: 1, 2, 4 or 10, whichever leads lowest on some of the samples for equal
            work, where a round's gradient and sums count as 2. Then twice as many from each round
            on that leaves more than 0.3 of the gap, up to 16, for as long as it helps.
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
        """Step size and passes (0: not known yet), the anchor before with objective and gap."""
        return {
            "eta": self.eta or 0.0,
            "passes": self.passes or 0.0,
            "before": params.clone(),
            "held": math.inf,
            "gap": math.inf,
            **longer.known(),
        }

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """Where local steps lead; or back, if the last ones led up."""
        import torch

        state = yield from self.searched(state, found, me)
        eta, task = state["eta"], me.task
        assert task is not None
        w, objective, gap = found.w, found.certificate.objective, found.certificate.gap
        length = {name: state[name] for name in ("passes", *longer.known())}
        if not objective <= state["held"] + 1e-12 * abs(state["held"]):
            eta, w, objective, gap = eta / 2, state["before"], state["held"], state["gap"]
            found, length["left"] = (yield from self.found(w, me)), 0.0
        elif self.passes is None:
            length = longer.next_passes(state, gap, objective, task.l2)
        n, seed = math.ceil(length["passes"] * task.n_own), (me.seed, me.rank, state["step"])
        asked = self.steps(w, found.z, found.here, n=n, eta=eta, seed=seed, me=me)
        after = yield from self.walked(asked, state["step"], me)
        after = torch.where(torch.isfinite(after), after, math.inf)
        kept = {"eta": eta, "before": w, "held": objective, "gap": gap, **length}
        return task.nearest(after), kept

    def searched(self, state: State, found: Found, me: Worker) -> Program[State]:
        """With a step size, the least that a worker asks for, and passes, if they are not known."""
        task, eta, passes = me.task, state["eta"], state["passes"]
        assert task is not None
        if eta and passes:
            return state
        w, walk = found.w, partial(self.steps, me=me)
        if not eta:
            search = partial(longer.eta, task, w, walk, self.pull(me), passes or longer.TRIED[0])
            n = longer.eta_samples(task, passes or longer.TRIED[0])
            wish = yield Local(work=search, batches=task.batches(n))
            eta = yield from self.least(wish)
        if not passes:
            tries = partial(longer.ends, task, w, partial(self.walk_on, me), eta)
            own = yield Local(work=tries, batches=task.batches(longer.ends_samples(task)))
            (told,) = yield from self.summed(w.new_tensor(own))
            passes = longer.chosen(told.tolist())
        return {**state, "eta": eta, "passes": passes}

    def walk_on(self, me: Worker, few: Task) -> Walk:
        """Steps as a worker takes them that has but these samples."""
        return partial(self.steps, me=replace(me, task=few))

    def steps(
        self,
        w: torch.Tensor,
        z: torch.Tensor,
        here: Here,
        *,
        n: int,
        eta: float,
        seed: Sequence[int],
        me: Worker,
    ) -> Steps:
        """So many of this size, around w, where the gradient of all that are summed is z."""
        return Steps(
            start=w,
            anchor=w,
            slopes=here.slopes,
            b=z + self.offset(w, me),
            n=n,
            eta=eta,
            seed=seed,
            mu=self.pull(me),
            exact=self.exact,
            mean=self.send == "mean",
        )

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

    def length(self, state: State) -> float | None:
        """As searched for, given, or grown to."""
        return state["passes"] or None


class PSCOPE(Anchored, frozen=True, kw_only=True, tag="pSCOPE", tag_field="kind"):
    """Local steps with a prox, so that sparse models stay so: any penalty.

    z = 1/n sum_i grad f_i(w). From u = w each worker takes steps, of a sample i of its own,
    u <- prox(u - eta (grad f_i(u) - grad f_i(w) + z)); the next w is the mean of all workers' u.

    Source: Zhao, Zhang, Li and Li 2018, "Proximal SCOPE for Distributed Sparse Learning",
    algorithm 1.

    Attributes:
        eta: Step size; unless given, it is searched for on some of the samples.
        passes: Local steps of a round, over the samples of a worker; unless given, they are
            searched for too: 1, 2, 4 or 10, whichever leads lowest on some of the samples for equal
            work, where a round's gradient and sums count as 2. Then twice as many from each round
            on that leaves more than 0.3 of the gap, up to 16, for as long as it helps.
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
        passes: Local steps of a round, over the samples of a worker; unless given, they are
            searched for too: 1, 2, 4 or 10, whichever leads lowest on some of the samples for equal
            work, where a round's gradient and sums count as 2. Then twice as many from each round
            on that leaves more than 0.3 of the gap, up to 16, for as long as it helps.
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
