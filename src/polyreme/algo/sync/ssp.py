"""SSP: no worker is further ahead of the slowest one than a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ..effects import Program
from ..push import HELLO, LEFT, Push
from .kind import State, additive, gradient, stride
from .served import Served
from .served_kind import Work

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class SSP(Served, frozen=True, kw_only=True, tag="SSP", tag_field="kind"):
    """Stale synchronous parallel: a worker goes on while the slowest is not too far behind.

    A worker's clock is how many changes it pushed, each a step of the rule with a state of its own;
    parameters go the nth part of each change. One at clock t is answered once all that are present
    are at t - staleness or later. So it sees all changes before clock t - staleness of all, all of
    its own, and some in between. A bound of 0 is bulk-synchronous training; there is none below. A
    worker that comes is at the clock of the slowest that is present. Of a rule that ends in a prox
    changes do not add up: workers push the step before it, and a server takes the prox of the nth
    part of the rate after each.

    Source: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server"; Cui et al. 2014, "Exploiting Bounded Staleness to Speed Up Big Data
    Analytics".
    Differs: a worker reads at every clock, and no parameters that it has from an earlier one.

    Attributes:
        servers: How many servers there are.
        ahead: 0, as it has workers see all of their own changes.
        staleness: Clocks that a worker may be ahead of the slowest.
    """

    not_ahead: ClassVar[str] = "has workers see all of their own changes"
    steps_at_worker: ClassVar[bool] = True
    promise: ClassVar[str] = "no worker is more than `staleness` clocks ahead of another"
    settles: ClassVar[bool] = True
    staleness: Annotated[int, msgspec.Meta(ge=0)] = 3

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Each worker's clock, and whether it waits."""
        workers = [str(worker) for worker in range(me.n)]
        return {
            "clocks": dict.fromkeys(workers, 0),
            "waits": dict.fromkeys(workers, False),
            **self.ending(algorithm, piece),
        }

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """A step of the rule: what is taken off parameters by it."""
        params, rule = state["params"], state["rule"]
        at = algorithm.feedback.at(params, state["exchange"]["0"]["feedback"])
        own = yield from gradient(algorithm, at, (state["step"],), me)
        if not own.is_finite or not own.weight:
            return Work(vectors=(params,), rows=(own.numbers,), changed={})
        lr = self.rate(state, me)
        delta, rule, _ = yield from stride(additive(algorithm), params, own.gradient, rule, lr, me)
        return Work(vectors=(-delta,), rows=(own.numbers,), changed={"rule": rule})

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> State:
        """The nth part of a change."""
        (change,) = push.vectors
        return self.ended(algorithm, state, state["params"] - change / me.n, lr / me.n, me)

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """The clock, also of a push that does not count, and who waits from now on."""
        worker, clocks = str(push.worker), state["clocks"]
        clock = clocks[worker] + 1
        if push.number < 0:
            others = [clocks[w] for w, here in state["present"].items() if here and w != worker]
            clock = min(others) if push.number == HELLO and others else clocks[worker]
        waits = {**state["waits"], worker: push.number != LEFT}
        return {"clocks": {**clocks, worker: clock}, "waits": waits}

    def answered(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[int]]:
        """All that wait and are not too far ahead."""
        clocks = state["clocks"]
        slowest = min((clocks[w] for w, here in state["present"].items() if here), default=0)
        free = [
            worker
            for worker, waits in state["waits"].items()
            if waits and clocks[worker] - slowest <= self.staleness
        ]
        return {"waits": state["waits"] | dict.fromkeys(free, False)}, [int(w) for w in free]
