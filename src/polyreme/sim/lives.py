"""Workers that go and come: when, who hears of it, and which messages still find them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..algo.effects import Received
from ..algo.push import LEFT
from ..algo.sync.peers import Peers
from ..algo.sync.served import Served
from .clock import Clock
from .faults import Fault
from .faults.kind import Outage
from .links import Mail

if TYPE_CHECKING:
    import torch

    from ..algo.compose import DataParallel
    from ..algo.packet import Message
    from ..algo.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Acts:
    """What happens to players: a worker goes or comes, a notice is sent, a message is there."""

    leave: Callable[[int], None]
    come: Callable[[int], None]
    notify: Callable[[int, Mail], None]
    deliver: Callable[[int, Mail], None]


class Lives:
    """Plays faults on a clock, and tells messages of one life of a worker from those of another.

    A worker's messages are of the life that it sent them in, a server's answers of the life that it
    last heard from: so an answer to what a worker sent before it crashed never comes to the worker
    that came back. Those from worker to worker are for the life that is there when they are sent.
    Crashes to come keep nothing going; a worker that is to come back does.
    """

    def __init__(
        self,
        faults: Sequence[Fault],
        algorithm: DataParallel,
        workers: Sequence[Worker],
        start: torch.Tensor,
        seed: int,
        clock: Clock,
        acts: Acts,
    ) -> None:
        sync = algorithm.sync
        assert isinstance(sync, Served | Peers), "faults are of workers that have servers"
        self._algorithm, self._sync = algorithm, sync
        self._workers, self._n = workers, workers[0].n
        self._start, self._clock, self._acts = start, clock, acts
        self._life = [0] * self._n
        self._heard: dict[tuple[int, int], int] = {}
        self._untold: set[int] = set()
        self._coming = [_of(faults, worker, seed) for worker in range(self._n)]
        self.gone: set[int] = set()
        self.n_crashes = self.n_returns = 0
        self._begun = False

    def begin(self) -> None:
        """Before anybody begins: those that join later are not there."""
        if self._begun:
            return
        self._begun = True
        for worker in range(self._n):
            outage = next(self._coming[worker], None)
            if outage is not None and outage.detect_s is None:
                self._leave(worker, outage)
            else:
                self._set(worker, outage)

    def life(self, source: int, to: int) -> int:
        """Which life of a worker a message is of that it sends or is sent."""
        if source < self._n and to < self._n:
            return self._life[to]
        return self._life[source] if source < self._n else self._heard.get((source, to), 0)

    def takes(self, to: int, mail: Mail) -> bool:
        """Whether a message still finds whom it was meant for."""
        return to >= self._n or (to not in self.gone and mail.life == self._life[to])

    def hear(self, rank: int, mail: Mail) -> None:
        """A server reads a message."""
        if rank >= self._n:
            self._heard[rank, mail.received.source] = mail.life

    def anew(self, worker: int, lost: dict[str, Any], n_batches: int) -> dict[str, Any]:
        """The state of a worker that comes back, from counts alone of the one that it lost."""
        me = self._workers[worker]
        state = self._sync.init(self._algorithm, self._start.clone(), me)
        state["step"] = max(n_batches, lost["step"])
        if "pushes" in state:
            state["pushes"] = lost["pushes"]
        return self._sync.anew(self._algorithm, state)

    def _set(self, worker: int, outage: Outage | None) -> None:
        """Set a worker's next crash, of those that it has lived to see."""
        while outage is not None and outage.at_s < self._clock.now_s:
            outage = next(self._coming[worker], None)
        if outage is not None:
            self.n_crashes += 1
            self._clock.at(outage.at_s, self._crash, worker, outage)

    def _crash(self, worker: int, outage: Outage) -> None:
        self.n_crashes -= 1
        assert outage.detect_s is not None, "a worker that was there"
        self._untold.add(worker)
        heard_s = self._clock.now_s + outage.detect_s
        self._clock.at(heard_s, self._tell, worker, self._life[worker])
        self._leave(worker, outage)

    def _leave(self, worker: int, outage: Outage) -> None:
        self.gone.add(worker)
        self._acts.leave(worker)
        if outage.detect_s is None:
            self._notify(worker, self._acts.deliver)
        if outage.back_s is not None:
            self.n_returns += 1
            self._clock.at(outage.back_s, self._come, worker)

    def _come(self, worker: int) -> None:
        self.n_returns -= 1
        self._tell(worker, self._life[worker])
        self._life[worker] += 1
        self.gone.remove(worker)
        self._set(worker, next(self._coming[worker], None))
        self._acts.come(worker)

    def _tell(self, worker: int, life: int) -> None:
        """Servers hear of a crash, unless they did before."""
        if worker in self._untold and life == self._life[worker]:
            self._untold.remove(worker)
            self._notify(worker, self._acts.notify)

    def _notify(self, worker: int, how: Callable[[int, Mail], None]) -> None:
        for server in self._sync.hear_of(worker, self._n):
            received = Received(source=worker, message=self._gone(worker, server))
            mail = Mail(received, self._clock.now_s, self._life[worker], is_notice=True)
            how(server, mail)

    def _gone(self, worker: int, server: int) -> Message:
        if isinstance(self._sync, Peers):
            return self._sync.gone()
        form = self._sync.form(self._algorithm)
        return form.notice(LEFT, self._start, server - self._n, self._workers[worker])


def _of(faults: Sequence[Fault], worker: int, seed: int) -> Iterator[Outage]:
    """All of a worker's, in order of time."""
    each = (fault.outages(worker, seed) for fault in faults)
    return heapq.merge(*each, key=lambda outage: outage.at_s)
