"""Asynchronous ADMM for consensus."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from ..effects import Program, settled
from ..push import Push
from .barrier import Barrier
from .coming_alone import undressed
from .kind import State, additive
from .served_kind import Work

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class AsyncADMM(Barrier, frozen=True, kw_only=True, tag="AsyncADMM", tag_field="kind"):
    """Workers solve problems of their own that a consensus ties; it moves when enough have come.

    Worker i has a model x_i and a dual y_i, of f_i, its mean loss. With consensus z it sets y_i to
    y_i + rho (x_i - z), moves x_i along the gradient of f_i(x) + y_i x + rho/2 |x - z|^2 by steps
    of the rule, and pushes x_i + y_i / rho. The server sets z to the mean of what all pushed last
    once `barrier` workers wait for it, and all whose last push is in `delay` - 1 older ones; then
    it answers those that wait. A worker that is gone is not waited for, and counts with its last
    push. A step whose gradient is not finite drops its push. The model is z. Where the rule ends in
    a prox, of R, the problem is the mean of f_i plus R: local steps are those before the prox, and
    z is the prox of R / rho at that mean, so that it is sparse.

    Source: Zhang and Kwok 2014, "Asynchronous Distributed ADMM for Consensus Optimization",
    algorithms 1 and 2; consensus as in Boyd et al. 2011, sections 7.1 and 7.1.1.
    Differs: the local problem is solved by a number of steps, to whatever they come.

    Attributes:
        servers: 1, so that all parameters are of the same workers.
        ahead: 0, as it waits for one push of each worker.
        rho: Weight of the tie.
        barrier: Workers that the consensus waits for (all that are present, if fewer).
        delay: Consensuses within which each worker is heard; 1 waits for all, as synchronous ADMM.
        local_steps: Steps of a worker between two pushes.
    """

    steps_at_worker: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    promise: ClassVar[str] = "each consensus has pushes of the last `delay` ones"
    rho: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    barrier: Annotated[int, msgspec.Meta(ge=1)] = 1
    delay: Annotated[int, msgspec.Meta(ge=1)] = 8
    local_steps: Annotated[int, msgspec.Meta(ge=1)] = 8

    @property
    def per_push(self) -> int:
        """The local steps."""
        return self.local_steps

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """A model is pushed as it is."""
        return undressed("AsyncADMM", "pushes a model, not a change of it", algorithm)

    def own(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """The model, and the dual."""
        return {"model": params.clone(), "dual": params.new_zeros(params.shape)}

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """What each pushed last, and how many consensuses ago."""
        workers = [str(worker) for worker in range(me.n)]
        return {
            **super().kept(algorithm, piece, me),
            "held": {worker: piece.clone() for worker in workers},
            "ages": dict.fromkeys(workers, 0),
            **self.ending(algorithm, piece),
        }

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """The dual's step, then the model's."""
        tie, model, rule = state["params"], state["model"], state["rule"]
        dual, lr, rows = state["dual"] + self.rho * (model - tie), self.rate(state, me), []
        local = additive(algorithm).rule
        for batch in range(state["step"], state["step"] + self.local_steps):
            found, numbers = yield from self.found(algorithm, model, batch, me)
            rows.append(numbers)
            if numbers.finite and numbers.weight:
                found = found + dual + self.rho * (model - tie)
                delta, rule = yield from settled(
                    local.update(found, rule, model, lr=lr, layout=me.layout)
                )
                model = model + delta
        changed = {"model": model, "dual": dual, "rule": rule}
        work = Work(vectors=(model + dual / self.rho,), rows=tuple(rows), changed=changed)
        return work if work.counts else replace(work, changed={})

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """Who waits from now on; one that comes is not late."""
        worker, came = str(push.worker), push.number >= 0
        ages = state["ages"] if came else {**state["ages"], worker: 0}
        return {"waits": {**state["waits"], worker: came}, "ages": ages}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """Kept until a consensus."""
        return {"held": {**state["held"], str(push.worker): push.vectors[0]}}

    def met(self, algorithm: DataParallel, state: State, lr: float, me: Worker) -> State:
        """The consensus, where enough wait for it and none that does not is too late."""
        waits, ages = state["waits"], state["ages"]
        here = [worker for worker, present in state["present"].items() if present]
        late = any(ages[worker] + 1 >= self.delay for worker in here if not waits[worker])
        if late or sum(waits.values()) < max(1, min(self.barrier, len(here))):
            return {}
        mean = sum(state["held"].values()) / me.n
        return {
            **self.ended(algorithm, state, mean, 1 / self.rho, me),
            "ages": {worker: 0 if waits[worker] else age + 1 for worker, age in ages.items()},
            "closed": True,
        }
