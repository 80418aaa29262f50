"""What syncs have in common that see the whole objective of a linear model at every round."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from ...errors import undefined
from ..effects import Local, Program
from .kind import State
from .rounds import Rounds, Went

if TYPE_CHECKING:
    import torch

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

    Subclasses say in `moved` how the next model is found.
    """

    certifies: ClassVar[bool] = True

    def moved(self, state: State, found: Found, me: Worker) -> Program[tuple[torch.Tensor, State]]:
        """The next model, and what of the state changes."""
        raise undefined(self, "moved")

    def went(self, state: State, me: Worker) -> Program[Went]:
        """The whole gradient, then a move."""
        found = yield from self.found(state["params"], me)
        params, changed = yield from self.moved(state, found, me)
        return Went(
            params=params,
            changed=changed,
            loss=found.here.loss,
            grad_norm=float(found.z.norm()),
            objective=found.certificate.objective,
            gap=found.certificate.gap,
        )

    def finite(self, went: Went) -> bool:
        """A model that is not finite is one to go back on."""
        return True

    def found(self, w: torch.Tensor, me: Worker) -> Program[Found]:
        """What is known of a model: two sums over workers, of D + 2 numbers and of one."""
        task = me.task
        assert task is not None
        here = yield Local(work=partial(task.at, w), batches=task.batches(task.n_own))
        sums, own = yield from self.summed(
            here.gradient, here.gradient.new_tensor([here.loss, task.n_own])
        )
        loss, n = own.tolist()
        z = sums / n
        conjugates = task.conjugates(here.slopes, task.shrink(z))
        (told,) = yield from self.summed(z.new_tensor([conjugates]))
        certificate = task.certificate(w, z, loss / n, float(told) / n)
        return Found(w=w, z=z, n=n, here=here, certificate=certificate)
