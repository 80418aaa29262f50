"""Buffered asynchronous SGD: steps along a robust aggregate of buffers of pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from ..effects import Now, Program, Suspect, settled
from ..push import Push
from .kind import State
from .served import Served

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker

_PUSHES = 2  # in which time others, that are no slower than half as fast, have pushed once


class BASGD(Served, frozen=True, kw_only=True, tag="BASGD", tag_field="kind"):
    """Gradients are averaged in buffers; once each has one, a step is made of their aggregate.

    A push of worker s goes to buffer s mod B and is answered at once. When all buffers have a push
    there is a step of the rule along the aggregate of their B means, each of which counts alike
    however many pushes are in it, and all are emptied. So r hostile workers are in no more than r
    buffers of a step, and the aggregate, which is of B rows, is to bear r of them. One buffer and
    the mean is asynchronous SGD; with momentum at workers (WorkerMomentum) this is BASGDm. The
    version is the step's, so delays are in steps. Weights that workers tell are not looked at, and
    whether a push is finite the server finds itself: one that is not reaches no buffer, where it
    would take those of others with it; its worker is a suspect, as are workers with a push in a
    buffer that the aggregate suspects.

    A buffer starves when none of its workers pushes, and no step is made then. Where that lasts for
    more than `timeout_s` and at least B workers pushed twice meanwhile, all are dealt out anew,
    those first, so that each buffer has one of them; workers that did not push at all are suspects.
    Where fewer pushed no step is made until more do: fewer buffers would bear fewer hostile ones.

    Source: Yang and Li 2021, "BASGD: Buffered Asynchronous SGD for Byzantine Learning"; with
    momentum Yang and Li 2023, "Buffered Asynchronous SGD for Byzantine Learning".
    Differs: buffers are emptied when workers are dealt out anew, so that a hostile worker is in one
    buffer of a step, and never in two.

    Attributes:
        servers: How many servers there are; 1, unless the aggregate works entry by entry. Then each
            fills its buffers, and deals, by what comes to it.
        ahead: Pushes of a worker that may be unanswered while it computes.
        buffers: B, at most as many as workers.
        timeout_s: Seconds without a step after which workers are dealt out anew; none: never.
    """

    aggregates: ClassVar[bool] = True
    distrusts: ClassVar[bool] = True
    promise: ClassVar[str] = "nobody waits for another, and hostile workers are in few buffers"
    buffers: Annotated[int, msgspec.Meta(ge=1)] = 1
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = 60.0

    def n_rows(self, n: int) -> int:
        """One of each buffer."""
        return self.buffers

    def refused(self, n: int) -> list[Violation]:
        """More buffers than workers, of which some would stay empty."""
        if self.buffers <= n:
            return []
        rule = f"is more than {n} workers, and a buffer without one stays empty"
        path, legal = "data_parallel.sync.buffers", f"1 to {n}"
        return [Violation(path=path, value=self.buffers, rule=rule, legal=legal)]

    def kept(self, algorithm: DataParallel, piece: torch.Tensor, me: Worker) -> State:
        """Each buffer's sum and count, each worker's buffer, what it pushed since the last step."""
        numbers, workers = map(str, range(self.buffers)), map(str, range(me.n))
        sums = {number: piece.new_zeros(piece.shape) for number in numbers}
        buffer = {worker: int(worker) % self.buffers for worker in workers}
        return {
            "sums": sums,
            "counts": dict.fromkeys(sums, 0),
            "buffer": buffer,
            "pushed": dict.fromkeys(buffer, 0),
            "since_s": 0.0,
            "aggregate": algorithm.aggregate.init(piece),
        }

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Program[State]:
        """One push more in its buffer; the step, if it was the last that was missing."""
        now_s = yield Now()
        worker = str(push.worker)
        pushed = {**state["pushed"], worker: state["pushed"][worker] + 1}
        since_s = min(state["since_s"], now_s)  # this clock may have begun after it
        state = {**state, "pushed": pushed, "since_s": since_s}
        if self._starves(state, worker, now_s - since_s):
            if silent := tuple(int(w) for w, count in pushed.items() if not count):
                yield Suspect(workers=silent)
            state = self._dealt_out(state, worker, now_s)
        number = str(state["buffer"][worker])
        (found,), count = push.vectors, state["counts"][number]
        total = state["sums"][number] + found if count else found
        state = {
            **state,
            "sums": {**state["sums"], number: total},
            "counts": {**state["counts"], number: count + 1},
        }
        if not all(state["counts"].values()):
            return state
        return (yield from self._stepped(algorithm, {**state, "since_s": now_s}, lr, me))

    def _starves(self, state: State, worker: str, seconds: float) -> bool:
        """Whether a buffer is empty for too long that this worker's push does not go to.

        That others did not push says something once this one has pushed twice.
        """
        late = self.timeout_s is not None and seconds > self.timeout_s
        if not late or state["pushed"][worker] < _PUSHES:
            return False
        own = str(state["buffer"][worker])
        return any(not count and number != own for number, count in state["counts"].items())

    def _dealt_out(self, state: State, worker: str, now_s: float) -> State:
        """Empty buffers, and workers dealt out to them anew, if enough of them push."""
        pushed, here = state["pushed"], state["present"]
        live = [w for w, count in pushed.items() if here[w] and count >= _PUSHES]
        if len(live) < self.buffers:
            return state
        order = [*live, *(w for w in pushed if w not in live)]
        return {
            **state,
            "counts": dict.fromkeys(state["counts"], 0),
            "buffer": {w: order.index(w) % self.buffers for w in pushed},
            "pushed": {**dict.fromkeys(pushed, 0), worker: 1},
            "since_s": now_s,
        }

    def _stepped(
        self, algorithm: DataParallel, state: State, lr: float, me: Worker
    ) -> Program[State]:
        """The rule's step along the aggregate."""
        rows = [total / state["counts"][number] for number, total in state["sums"].items()]
        found, aggregate, named = yield from settled(
            algorithm.aggregate.combine(rows, state["aggregate"])
        )
        pushed, buffer = state["pushed"], state["buffer"]
        suspects = tuple(int(w) for w, count in pushed.items() if count and buffer[w] in named)
        if suspects:
            yield Suspect(workers=suspects)
        changed = yield from self.ruled(algorithm, state, found, lr, me)
        return {
            **state,
            **changed,
            "counts": dict.fromkeys(state["counts"], 0),
            "pushed": dict.fromkeys(pushed, 0),
            "aggregate": aggregate,
            "version": state["version"] + 1,
        }
