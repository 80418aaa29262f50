"""CoCoA+: workers go up the dual with their own variables; changes are added."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..effects import Local, Program
from ..task import DualSteps, Task
from .kind import State
from .rounds import Rounds, Went

if TYPE_CHECKING:
    import torch

    from ..worker import Worker

_SHARES = (0.0, *(2.0**-k for k in range(10, -1, -1)))


class CoCoA(Rounds, frozen=True, kw_only=True, tag="CoCoA", tag_field="kind"):
    """Workers go up the dual, each with a variable for each of its samples; changes are added.

    All know v = 1/n sum_i a_i x_i, and the model w = soft(v, l1) / l2. From a and v each worker
    takes steps of stochastic dual coordinate ascent, as if v changed by n_workers times what it
    changes; a round sums what each adds to v. Dual variables stay with the worker. Rounds have a
    duality gap of their own, from two numbers beside that sum.

    Source: Ma, Smith, Jaggi, Jordan, Richtarik and Takac 2015, "Adding vs Averaging in Distributed
    Primal-Dual Optimization", algorithm 1 with gamma = 1, sigma' = K. With l1: Smith et al. 2018,
    "CoCoA: A General Framework for Communication-Efficient Distributed Optimization".
    Differs: a worker's steps go up R* at v plus K times its change, which bounds the dual more
    closely than the square about v does.

    Attributes:
        passes: Steps of a round, over the samples of a worker.
    """

    passes: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    strongly: ClassVar[bool] = True
    by_feature: ClassVar[bool] = True
    certifies: ClassVar[bool] = True

    @property
    def n_vectors(self) -> int:
        """The shared vector v."""
        return 1

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """Dual variables, v, how many samples all have, and the workers that these are of."""
        n = 0 if me.task is None else me.task.n_own
        return {"dual": params.new_zeros(n), "v": params.clone(), "n": 0.0, "workers": 0}

    def went(self, state: State, me: Worker) -> Program[Went]:
        """Steps, and the gap of the model before them; if it suffices, they are not kept."""
        task = me.task
        assert task is not None
        dual, v, n, w = state["dual"], state["v"], state["n"], state["params"]
        if state["workers"] != me.n:
            dual, v, n = yield from self.begun(w, task)
            w = _model(v, task)
        loss = yield Local(work=partial(task.loss, w), batches=task.batches(task.n_own))
        asked = DualSteps(
            dual=dual,
            v=v,
            n=math.ceil(self.passes * task.n_own),
            n_all=n,
            sigma=float(me.n),
            seed=(me.seed, me.rank, state["step"]),
        )
        after, change = yield Local(
            work=partial(task.dual_steps, asked), batches=task.batches(asked.n)
        )
        told = v.new_tensor([loss, task.conjugates(-dual, 1.0)])
        change, told = yield from self.summed(change, told)
        mean_loss, conjugates = (told / n).tolist()
        # Its gradient is that of the dual's model, which is none of the loss's: 0 always.
        found = task.certificate(w, -v, mean_loss, conjugates)
        if me.goal.met(found.gap, None):
            after, change = dual, 0.0
        v = v + change
        return Went(
            params=_model(v, task),
            changed={"dual": after, "v": v, "n": n, "workers": me.n},
            loss=loss,
            objective=found.objective,
            gap=found.gap,
        )

    def begun(
        self, w: torch.Tensor, task: Task
    ) -> Program[tuple[torch.Tensor, torch.Tensor, float]]:
        """Dual variables, v and samples of all, where a model is all that is known.

        They are a share of the slopes there, with their sign turned: the one that is highest on
        the dual. At an optimum it is 1.
        """
        here = yield Local(work=partial(task.at, w), batches=task.batches(task.n_own))
        each = [task.conjugates(here.slopes, share) for share in _SHARES]
        sums, told = yield from self.summed(here.gradient, w.new_tensor([*each, task.n_own]))
        n = float(told[-1])
        z = sums / n
        heights = [
            -(float(c) / n + task.penalty_conjugate(-share * z))
            for share, c in zip(_SHARES, told[:-1], strict=True)
        ]
        share = _SHARES[heights.index(max(heights))]
        return -share * here.slopes, -share * z, n


def _model(v: torch.Tensor, task: Task) -> torch.Tensor:
    """The largest of v w - R(w)."""
    return v.sign() * (v.abs() - task.l1).clamp(min=0.0) / task.l2
