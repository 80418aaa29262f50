"""Plays the programs of all workers on a virtual clock, in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..algo.compose import DataParallel
from ..algo.effects import (
    ANY,
    Agree,
    Combine,
    Compute,
    Computed,
    Effect,
    Members,
    Now,
    Received,
    Record,
    Recv,
    Seen,
    Send,
    Sleep,
    SumShards,
)
from ..algo.ledger import Ledger
from ..algo.worker import Worker
from .clock import Clock
from .compute import Compute as ComputeModel
from .compute import Constant
from .network import Network

if TYPE_CHECKING:
    import torch

_ALIKE, _USUAL = Constant(), Network()


class Gradients(Protocol):
    """The gradients of a task."""

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch at these parameters."""


@dataclass
class _Player:
    """One worker: its state between rounds, its program within one."""

    me: Worker
    state: dict[str, Any]
    program: Any = None
    inbox: list[Received] = field(default_factory=list)
    wants: Recv | None = None
    n_waits: int = 0
    link_free_s: float = 0.0


class Simulation:
    """Workers on a virtual clock; `play` runs them to a step."""

    def __init__(
        self,
        algorithm: DataParallel,
        workers: Sequence[Worker],
        states: Sequence[dict[str, Any]],
        gradients: Gradients,
        *,
        compute: ComputeModel = _ALIKE,
        network: Network = _USUAL,
        on_record: Callable[[Worker, Record, float], None] | None = None,
    ) -> None:
        self.algorithm, self.gradients = algorithm, gradients
        self.compute, self.network = compute, network
        self.clock, self.ledger = Clock(), Ledger()
        self._on_record = on_record
        self._players = [_Player(me=me, state=s) for me, s in zip(workers, states, strict=True)]
        self._meetings: deque[tuple[int, Effect]] = deque()
        self._until = 0

    @property
    def states(self) -> list[dict[str, Any]]:
        """Of all workers, between rounds."""
        return [player.state for player in self._players]

    def play(self, until: int) -> None:
        """Rounds of every worker until it has done so many steps."""
        self._until = until
        for player in self._players:
            self._begin(player)
        self.clock.run()
        stuck = [player.me.rank for player in self._players if player.program is not None]
        assert not stuck, f"workers {stuck} wait for what never comes"

    def _begin(self, player: _Player) -> None:
        if player.state["step"] < self._until:
            player.program = self.algorithm.sync.round(self.algorithm, player.state, player.me)
            self._later(player, 0.0, None)

    def _later(self, player: _Player, seconds: float, answer: Any) -> None:
        self.clock.at(self.clock.now_s + seconds, lambda: self._go_on(player, answer))

    def _go_on(self, player: _Player, answer: Any) -> None:
        """Play a worker until it waits for something."""
        while True:
            try:
                effect = player.program.send(answer)
            except StopIteration as end:
                player.program, player.state = None, end.value
                self._begin(player)
                return
            if isinstance(effect, SumShards):
                answer = effect.partial
            elif isinstance(effect, Record):
                if self._on_record is not None:
                    self._on_record(player.me, effect, self.clock.now_s)
                answer = None
            elif isinstance(effect, Now):
                answer = self.clock.now_s
            elif isinstance(effect, Members):
                answer = tuple(range(player.me.n))
            elif isinstance(effect, Send):
                self._send(player, effect)
                answer = None
            else:
                self._wait(player, effect)
                return

    def _wait(self, player: _Player, effect: Effect) -> None:
        if isinstance(effect, Compute):
            found = self.gradients(player.me.rank, effect.params, effect.batch)
            seconds = self.compute.gradient_s(player.me, effect.batch)
            self._later(player, seconds, found)
        elif isinstance(effect, Sleep):
            self._later(player, effect.seconds, None)
        elif isinstance(effect, Recv):
            self._receive(player, effect)
        else:
            assert isinstance(effect, Agree | Combine)
            self._meet(player, effect)

    def _meet(self, player: _Player, effect: Agree | Combine) -> None:
        """Wait for all others at the same effect; the last to come answers all."""
        self._meetings.append((player.me.rank, effect))
        if len(self._meetings) < len(self._players):
            return
        met = sorted(self._meetings, key=lambda each: each[0])
        self._meetings.clear()
        effects = [each for _, each in met]
        assert len({type(each) for each in effects}) == 1, "all workers play the same program"
        answer: Any
        if isinstance(effect, Agree):
            told = [each.batches for each in effects if isinstance(each, Agree)]
            sizes = [8 * sum(map(len, batches)) for batches in told]
            answer = Seen.of(told)
        else:
            messages = [each.message for each in effects if isinstance(each, Combine)]
            sizes = [message.nbytes for message in messages]
            answer = effect.function(messages)
        self.ledger.gathered(sizes)
        seconds = self.network.gathering_s(sizes)
        for other in self._players:
            self._later(other, seconds, answer)

    def _send(self, player: _Player, effect: Send) -> None:
        n_bytes, now_s = effect.message.nbytes, self.clock.now_s
        self.ledger.sent(player.me.rank, effect.to, n_bytes)
        player.link_free_s = max(player.link_free_s, now_s) + self.network.sending_s(n_bytes)
        to = self._players[effect.to]
        received = Received(source=player.me.rank, message=effect.message)
        arrival_s = player.link_free_s + self.network.latency_s
        self.clock.at(arrival_s, lambda: self._deliver(to, received))

    def _deliver(self, player: _Player, received: Received) -> None:
        player.inbox.append(received)
        if player.wants is not None:
            self._look(player)

    def _receive(self, player: _Player, effect: Recv) -> None:
        player.wants = effect
        player.n_waits += 1
        if not self._look(player) and effect.timeout_s is not None:
            number = player.n_waits
            when_s = self.clock.now_s + effect.timeout_s
            self.clock.at(when_s, lambda: self._give_up(player, number))

    def _look(self, player: _Player) -> bool:
        wants = player.wants
        assert wants is not None
        for index, received in enumerate(player.inbox):
            if wants.source in (ANY, received.source):
                del player.inbox[index]
                player.wants = None
                self._later(player, 0.0, received)
                return True
        return False

    def _give_up(self, player: _Player, number: int) -> None:
        if player.wants is not None and player.n_waits == number:
            player.wants = None
            self._later(player, 0.0, None)
