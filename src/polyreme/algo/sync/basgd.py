"""Buffered asynchronous SGD: steps along a robust aggregate of buffers of pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar

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
    version is the step's, so delays are in steps.

    Weights that workers tell are not looked at, and whether a push is finite the server finds
    itself: one that is not, or has no labels, is not added to its buffer. A buffer that had such a
    push and none that counts is absent: a step does not wait for it, as long as no more are absent
    than the aggregate bears (none, under a mean), of whose hostile rows they are.

    A buffer starves when none of its workers pushes, and no step is made then. Where that lasts for
    more than `timeout_s`, all workers are dealt out anew, those first that pushed twice meanwhile,
    so that each of them has a buffer of its own as far as they go; buffers beyond are absent until
    one of theirs pushes. If these are more than the aggregate bears, nobody is dealt out and no
    step made until more push.

    Suspects are workers with a push in a buffer that the aggregate suspects, those of absent
    buffers, those whose push was not finite although they said so, and those of whom nothing came
    for `timeout_s`.

    Source: Yang and Li 2021, "BASGD: Buffered Asynchronous SGD for Byzantine Learning"; with
    momentum Yang and Li 2023, "Buffered Asynchronous SGD for Byzantine Learning".
    Differs: buffers are emptied when workers are dealt out anew, so that a hostile worker is in one
    buffer of a step, and never in two.

    Attributes:
        servers: How many servers there are; 1, unless the aggregate works entry by entry. Then each
            fills its buffers, and deals, by what comes to it.
        ahead: Pushes of a worker that may be unanswered while it computes.
        buffers: B, at most as many as workers.
        timeout_s: Seconds without a step after which workers are dealt out anew.
    """

    aggregates: ClassVar[bool] = True
    distrusts: ClassVar[bool] = True
    promise: ClassVar[str] = "nobody waits for another, and hostile workers are in few buffers"
    buffers: Annotated[int, msgspec.Meta(ge=1)] = 1
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 60.0

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
            "absent": dict.fromkeys(sums, False),
            "buffer": buffer,
            "pushed": dict.fromkeys(buffer, 0),
            "since_s": 0.0,
            "aggregate": algorithm.aggregate.init(piece),
        }

    def heard(self, algorithm: DataParallel, state: State, push: Push, me: Worker) -> State:
        """That a buffer is absent, or no longer."""
        if push.number < 0:
            return {}
        number = str(state["buffer"][str(push.worker)])
        empty = not (push.counts or state["counts"][number])
        return {"absent": {**state["absent"], number: empty}}

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Program[State]:
        """One push more in its buffer, which it may have been dealt to just now."""
        now_s = yield Now()
        worker = str(push.worker)
        pushed = {**state["pushed"], worker: state["pushed"][worker] + 1}
        since_s = min(state["since_s"], now_s)  # this clock may have begun after it
        state = {**state, "pushed": pushed, "since_s": since_s}
        late = now_s - since_s > self.timeout_s
        if late and pushed[worker] >= _PUSHES and self._starves(algorithm, state, worker):
            if silent := tuple(int(w) for w, count in pushed.items() if not count):
                yield Suspect(workers=silent)
            state = self._dealt_out(algorithm, state, worker, now_s)
        number = str(state["buffer"][worker])
        (found,), count = push.vectors, state["counts"][number]
        total = state["sums"][number] + found if count else found
        return {
            **state,
            "sums": {**state["sums"], number: total},
            "counts": {**state["counts"], number: count + 1},
            "version": state["version"],
        }

    def met(self, algorithm: DataParallel, state: State, lr: float, me: Worker) -> Program[State]:
        """The rule's step along the aggregate, if no buffer is waited for."""
        there = [number for number, count in state["counts"].items() if count]
        if not there or not self._complete(algorithm, state, set(there)):
            return {}
        aggregate, absent = algorithm.aggregate, self.buffers - len(there)
        rows = [state["sums"][number] / state["counts"][number] for number in there]
        told: dict[str, Any] = {"absent": absent} if aggregate.robust else {}
        if aggregate.takes_numbers:
            told["numbers"] = [int(number) for number in there]
        found, kept, named = yield from settled(aggregate.combine(rows, state["aggregate"], **told))
        pushed, fine = (
            state["pushed"],
            {number for at, number in enumerate(there) if at not in named},
        )
        suspects = tuple(
            int(worker)
            for worker, number in state["buffer"].items()
            if str(number) not in fine and (pushed[worker] or str(number) not in there)
        )
        if suspects:
            yield Suspect(workers=suspects)
        changed = yield from self.ruled(algorithm, state, found, lr, me)
        return {
            **changed,
            "counts": dict.fromkeys(state["counts"], 0),
            "pushed": dict.fromkeys(pushed, 0),
            "since_s": (yield Now()),
            "aggregate": kept,
            "version": state["version"] + 1,
        }

    def _complete(self, algorithm: DataParallel, state: State, there: set[str]) -> bool:
        """Whether all buffers but these are absent, and no more than may be."""
        missing = state["counts"].keys() - there
        few = len(missing) <= algorithm.aggregate.bears
        return few and all(state["absent"][number] for number in missing)

    def _starves(self, algorithm: DataParallel, state: State, worker: str) -> bool:
        """Whether a step would not be made with this worker's push either."""
        there = {number for number, count in state["counts"].items() if count}
        return not self._complete(algorithm, state, there | {str(state["buffer"][worker])})

    def _dealt_out(self, algorithm: DataParallel, state: State, worker: str, now_s: float) -> State:
        """Empty buffers, and workers dealt out to them anew, if enough of them push."""
        pushed, here = state["pushed"], state["present"]
        live = [w for w, count in pushed.items() if here[w] and count >= _PUSHES]
        if self.buffers - len(live) > algorithm.aggregate.bears:
            return state
        order = [*live, *(w for w in pushed if w not in live)]
        return {
            **state,
            "counts": dict.fromkeys(state["counts"], 0),
            "absent": {number: int(number) >= len(live) for number in state["counts"]},
            "buffer": {w: order.index(w) % self.buffers for w in pushed},
            "pushed": {**dict.fromkeys(pushed, 0), worker: 1},
            "since_s": now_s,
        }
