"""What syncs have in common that see the whole objective of a linear model at every round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import undefined
from ..effects import Local, Program
from . import lower
from .kind import State
from .lower import Lower
from .rounds import Rounds, Went

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..task import Certificate, Here
    from ..worker import Worker


@dataclass(frozen=True, kw_only=True)
class Found:
    """At a model w: the whole sum's mean gradient `z` and certificate, and this worker's part."""

    w: torch.Tensor
    z: torch.Tensor
    n: float
    here: Here
    certificate: Certificate


class FiniteSum(Rounds, frozen=True, kw_only=True):
    """Rounds that begin with the gradient of all samples, and so with a certificate.

    Subclasses say in `moved` how the next model is found. Where the penalty has no l2 a state has
    slopes and gradients at a few models more than `n_vectors`, see `lower`.
    """

    certifies: ClassVar[bool] = True

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """With what is known of the optimum from below."""
        return {**super().init(algorithm, params, me), **lower.begun(params, me.task)}

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """The next model, and what of the state changes."""
        raise undefined(self, "moved")

    def went(self, state: State, me: Worker) -> Program[Went]:
        """The whole gradient, then a move; none where the model is as good as it has to be."""
        found, known = yield from self.bounded(state, me)
        certificate, params, changed = found.certificate, found.w, State()
        if not me.goal.met(certificate.gap, certificate.gradient):
            params, changed = yield from self.moved(state, found, me)
        return Went(
            params=params,
            changed={**known, **changed},
            loss=found.here.loss,
            grad_norm=float(found.z.norm()),
            objective=certificate.objective,
            gap=certificate.gap,
            gradient=certificate.gradient,
        )

    def lower(self, state: State, me: Worker) -> float:
        """The best bound of all rounds, if it is of this worker's samples."""
        task = me.task
        assert task is not None
        found: float = state["lower"]
        return found if task.shrinks and state["of"] == task.number ^ me.n else -math.inf

    def finite(self, went: Went) -> bool:
        """A model that is not finite is one to go back on."""
        return True

    def bounded(self, state: State, me: Worker) -> Program[tuple[Found, State]]:
        """As `found`, by the best bound of all rounds, and what is known from then on."""
        task, w = me.task, state["params"]
        assert task is not None
        if not task.shrinks:
            found = yield from self.found(w, me)
            return found, {}
        of = task.number ^ me.n
        known = Lower.kept(state)
        here, z, n, loss, same = yield from self.seen(w, me, float(known.of == of))
        known = known if same == me.n else known.anew(of)
        mixtures = task.mixtures(w, z, known.gradients[: known.earlier])
        own = [task.conjugates(known.mixed(each, here.slopes), 1.0) for each in mixtures]
        (sums,) = yield from self.summed(z.new_tensor(own))
        after = known.after((-sums / n).tolist(), z, here.slopes)
        certificate = task.certificate(w, z, loss, -after["lower"])
        return Found(w=w, z=z, n=n, here=here, certificate=certificate), after

    def found(self, w: torch.Tensor, me: Worker) -> Program[Found]:
        """What is known of a model: two sums over workers, of D + 2 numbers and of one."""
        task = me.task
        assert task is not None
        here, z, n, loss, *_ = yield from self.seen(w, me)
        conjugates = task.conjugates(here.slopes, task.shrink(z))
        (told,) = yield from self.summed(z.new_tensor([conjugates]))
        certificate = task.certificate(w, z, loss, float(told) / n)
        return Found(w=w, z=z, n=n, here=here, certificate=certificate)

    def seen(self, w: torch.Tensor, me: Worker, *told: float) -> Program[tuple[Any, ...]]:
        """Here, the mean gradient, all samples, the mean loss, and the sum of what each told."""
        task = me.task
        assert task is not None
        here = yield Local(work=partial(task.at, w), batches=task.batches(task.n_own))
        own = here.gradient.new_tensor([here.loss, task.n_own, *told])
        sums, said = yield from self.summed(here.gradient, own)
        loss, n, *others = said.tolist()
        return here, sums / n, n, loss / n, *others
