"""Downpour SGD: workers step for themselves, push what they gathered and fetch now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from ...errors import Violation
from ..effects import Program, Split
from ..push import Push
from .asgd import ASGD
from .kind import State
from .served_kind import Work

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_Count = Annotated[int, msgspec.Meta(ge=1)]


class Downpour(ASGD, frozen=True, kw_only=True, tag="Downpour", tag_field="kind"):
    """Workers push the sum of several gradients and fetch parameters after some of their pushes.

    Between fetches a worker takes steps of plain SGD on parameters of its own, at the rule's rate;
    servers take one of the rule along each sum. A worker waits for no answer to a push after which
    it does not fetch. If a gradient of a push is not finite, the push and its steps are dropped.
    Weight decay as that of a penalty is in each gradient; local steps end in the rule's
    prox, if it has one, and a server's in that of as many. The model is the servers'.

    Source: Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 and its
    algorithm 7.1.
    Differs: there is no Adagrad among rules, which servers have there; a fetch follows a push.

    Attributes:
        servers: How many servers there are.
        ahead: Pushes of a worker that may be unanswered while it computes.
        push_every: Local steps between pushes.
        fetch_every: Local steps between fetches, a multiple of push_every.
    """

    decays_at_worker: ClassVar[bool] = True
    push_every: _Count = 5
    fetch_every: _Count = 5

    @property
    def per_push(self) -> int:
        """The local steps."""
        return self.push_every

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """Fetches at pushes."""
        if self.fetch_every % self.push_every == 0:
            return []
        rule = f"must follow a push, which is each {self.push_every} steps"
        legal = f"a multiple of data_parallel.sync.push_every ({self.push_every})"
        path = "data_parallel.sync.fetch_every"
        return [Violation(path=path, value=self.fetch_every, rule=rule, legal=legal)]

    def own(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """What ends local steps."""
        return self.ending(algorithm, params)

    def work(self, algorithm: DataParallel, state: State, me: Worker) -> Program[Work]:
        """Local steps: the sum of their gradients."""
        params, lr = state["params"], self.rate(state, me)
        kept = state["exchange"]["0"]["feedback"]
        total, rows, rule = params.new_zeros(params.shape), [], algorithm.rule
        ended: State = {"ending": state["ending"]} if rule.settles else {}
        for batch in range(state["step"], state["step"] + self.push_every):
            at = algorithm.feedback.at(params, kept)
            found, numbers = yield from self.found(algorithm, at, batch, me)
            rows.append(numbers)
            if numbers.finite and numbers.weight:
                total, params = total + found, params - lr * found
                if rule.settles:
                    params, ending = rule.settle(params, ended["ending"], lr=lr, layout=me.layout)
                    ended = {"ending": ending}
        changed = {"params": params, **ended}
        work = Work(vectors=(total,), rows=tuple(rows), changed=changed)
        return work if work.counts else replace(work, changed={})

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Split[State]:
        """A step of the rule along the sum."""
        rule: Any = algorithm.rule
        if rule.settles:
            n = sum(bool(row.weight) for row in push.rows)
            algorithm = msgspec.structs.replace(algorithm, rule=rule.of_sum(n))
        return super().applied(algorithm, state, push, lr, me)

    def awaits(self, push: int) -> bool:
        """After those that a fetch is due at."""
        return (push + 1) % (self.fetch_every // self.push_every) == 0

    def answered(self, state: State, push: Push, me: Worker) -> tuple[State, Sequence[int]]:
        """Those that wait."""
        if push.number >= 0 and not self.awaits(push.number):
            return {}, ()
        return super().answered(state, push, me)
