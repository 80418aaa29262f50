"""ADMM: workers' own models, which are brought to agree with one that takes the penalty."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..effects import Local, Program
from ..search import first_eta, plain
from .kind import State
from .near import Near, come
from .rounds import Rounds, Went

if TYPE_CHECKING:
    import torch

    from ..worker import Worker

_Rate = Annotated[float, msgspec.Meta(gt=0)]
_FIRST = 0.001  # of the samples' curvature: the penalty of disagreeing that is begun with
_UNLIKE, _MOST = 2.0, 10.0  # residuals that are balanced, and by how much at once
_EVERY, _BALANCED = 3, 150


class ADMM(Rounds, frozen=True, kw_only=True, tag="ADMM", tag_field="kind"):
    """Workers' own models are pulled to a common one, which alone has the penalty.

    With s_k the worker's share of samples: x_k is near the least of
    s_k F_k(x) + rho/2 |x - z + u_k|^2, z is prox of R / (n rho) at the mean of x_k + u_k, and u_k
    grows by x_k - z. A round sums x_k + u_k.

    Source: Boyd, Parikh, Chu, Peleato and Eckstein 2011, "Distributed Optimization and Statistical
    Learning via the Alternating Direction Method of Multipliers", sections 7.1 and 3.4.
    Differs: x_k is what some anchored passes from the last x_k come to; residuals of the round
    before are balanced, relative to |z| and |u| (Wohlberg 2017, "ADMM Penalty Parameter Selection
    by Residual Balancing", section 4), every third round up to the 150th, where they differ by 2.

    Attributes:
        rho: Weight of disagreeing; unless given, it begins at 0.001 of the samples' curvature and
            goes where residuals are balanced.
        relax: Over-relaxation: so much of x_k, the rest of the last z, enters what follows.
        anchors: Gradients of its own samples that a worker takes in a round, beside the first.
        passes: Steps after each of these, over the samples of a worker.
        eta: Step size; unless given, each worker searches for its own on some of its samples.
    """

    rho: _Rate | None = None
    relax: Annotated[float, msgspec.Meta(ge=1, lt=2)] = 1.6
    anchors: Annotated[int, msgspec.Meta(ge=1)] = 2
    passes: _Rate = 2.0
    eta: _Rate | None = None

    @property
    def n_vectors(self) -> int:
        """Own model, and u."""
        return 2

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """x, u, what of rho, eta and all samples is known (0: not yet), and the last residuals."""
        return {
            "x": params.clone(),
            "u": params.new_zeros(len(params)),
            "rho": self.rho or 0.0,
            "eta": self.eta or 0.0,
            "n": 0.0,
            "apart": 0.0,
            "pulled": 0.0,
            "moved": 0.0,
        }

    def went(self, state: State, me: Worker) -> Program[Went]:
        """A worker's model, then the common one."""
        task, z, u = me.task, state["params"], state["u"]
        assert task is not None
        rho, eta, n = state["rho"], state["eta"], state["n"]
        if not n:
            (told,) = yield from self.summed(z.new_tensor([task.n_own]))
            n = float(told)
        if not eta:
            search = partial(first_eta, task, z, plain(False, 0.0), 0.0)
            eta = yield Local(work=search, batches=task.batches(min(task.n_own, 2000)) * 8)
        if not rho:
            rho = _FIRST / (yield from self.least(eta)) / me.n
        mu = rho * n / max(1, task.n_own)
        near = Near(
            pull=-mu * (z - u), mu=mu, exact=False, anchors=self.anchors, passes=self.passes
        )
        seed = (me.seed, me.rank, state["step"])
        came = yield from come(task, near, state["x"], eta, seed)
        eased = self.relax * came.u + (1 - self.relax) * z
        told = z.new_tensor([state["apart"], state["pulled"]])
        total, told = yield from self.summed(eased + u, told)
        after = task.prox(total / me.n, 1 / (me.n * rho))
        u = u + eased - after
        apart, pulled = told.sqrt().tolist()
        length = math.sqrt(me.n) * float(z.norm())
        factor = self.balance(state["step"], apart * pulled, state["moved"] * length)
        return Went(
            params=after,
            changed={
                "x": came.u,
                "u": u / factor,
                "rho": rho * factor,
                "eta": came.eta,
                "n": n,
                "apart": float((came.u - after).square().sum()),
                "pulled": float(u.square().sum()),
                "moved": math.sqrt(me.n) * float((after - z).norm()),
            },
            loss=came.loss,
        )

    def balance(self, step: int, apart: float, moved: float) -> float:
        """What rho is multiplied with: |x - z| / |z| is to be |z - last z| / |u|."""
        if self.rho is not None or step > _BALANCED or step % _EVERY or not apart * moved > 0:
            return 1.0
        if max(apart, moved) <= _UNLIKE * min(apart, moved):
            return 1.0
        return min(_MOST, max(1 / _MOST, math.sqrt(apart / moved)))

    def rate(self, state: State, me: Worker) -> float:
        """The step size."""
        eta: float = state["eta"]
        return eta
