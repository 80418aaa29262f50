"""Plays the programs of all workers on a virtual clock, in one process."""

from __future__ import annotations

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
    Sum,
    SumShards,
)
from ..algo.ledger import Ledger
from ..algo.packet import Message, total
from ..algo.topology.passing import share_of, vector
from ..algo.worker import Worker
from . import stuck
from .clock import Clock
from .compute import Compute as ComputeModel
from .compute import Constant
from .links import Links, Mail
from .network import Network, Uniform
from .spent import Spent

if TYPE_CHECKING:
    import torch

_ALIKE, _USUAL = Constant(), Uniform()


class Gradients(Protocol):
    """The gradients of a task."""

    def __call__(self, rank: int, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a worker's batch at these parameters."""


Together = Callable[[Sequence[tuple[int, "torch.Tensor", int]]], list[Computed]]
"""Gradients of several workers (rank, parameters, batch), in their order."""


@dataclass(kw_only=True, slots=True)
class _Player:
    """One worker: its state between rounds, its program within one, its mail.

    `blocked` is the effect that it waits at, since `since_s`; `n_waits` tells its waits apart.
    `begun` says that its round has had an answer: until then it can be taken back.
    """

    me: Worker
    state: dict[str, Any]
    program: Any = None
    inbox: list[Mail] = field(default_factory=list)
    blocked: Effect | None = None
    since_s: float = 0.0
    n_waits: int = 0
    begun: bool = False
    spent: Spent = field(default_factory=Spent)


class Simulation:
    """Workers, and their servers if they have any, on a virtual clock; `play` runs them to a step.

    Rounds are played one after another from `states`; between two calls of `play` there is no more
    than `states`, the time, and messages that nobody has asked for. What happens at the same time
    happens in the order in which it was set, workers first by their number, so that all is a
    function of the arguments. Gradients are computed when the first that was asked for is due, all
    of them by `together` if it is given. Messages are handed over as
    they are, not as bytes, and functions of all messages are called once: programs change neither.

    Where there are servers, which follow the workers, nobody waits for all: `play` stops the clock
    and the next one goes on from there. Servers are between rounds then, workers are not: `drain`
    brings all there.

    `done` steps have been done before. `seed` is of the seconds that `compute` draws. `on_record`
    is told worker, record and time.
    """

    def __init__(
        self,
        algorithm: DataParallel,
        workers: Sequence[Worker],
        states: Sequence[dict[str, Any]],
        gradients: Gradients,
        *,
        compute: ComputeModel = _ALIKE,
        network: Network = _USUAL,
        seed: int = 0,
        done: int = 0,
        on_record: Callable[[Worker, Record, float], None] | None = None,
        together: Together | None = None,
    ) -> None:
        self._together = together or self._one_by_one
        self._asked: dict[int, Compute] = {}
        self._found: dict[int, Computed] = {}
        self.algorithm, self.gradients = algorithm, gradients
        self.compute, self.network, self.seed = compute, network, seed
        self.clock, self.ledger = Clock(), Ledger()
        self._on_record = on_record
        self._players = [_Player(me=me, state=s) for me, s in zip(workers, states, strict=True)]
        self._met: list[_Player] = []
        self._until = self._n_active = 0
        self._n = self._players[0].me.n
        self._machines = self._placed()
        self._links = Links(network, self._machines, self.clock, self._deliver)
        self._recorded = done * self._n
        self._going = self._draining = False

    @property
    def states(self) -> list[dict[str, Any]]:
        """Of all workers, between rounds."""
        return [player.state for player in self._players]

    @property
    def spent(self) -> list[Spent]:
        """What each worker did with the virtual seconds, up to the end of the last `play`."""
        return [player.spent for player in self._players]

    @property
    def utilisation(self) -> float:
        """Seconds in gradients over all virtual seconds of all workers; 0 before any passed."""
        passed_s = self.clock.now_s * len(self._players)
        return sum(each.compute_s for each in self.spent) / passed_s if passed_s else 0.0

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each worker sent."""
        return self._bytes(0)

    @property
    def received_bytes(self) -> list[int]:
        """Bytes that were sent to each worker."""
        return self._bytes(1)

    def _bytes(self, end: int) -> list[int]:
        totals = [0] * len(self._players)
        for link, n_bytes in self.ledger.bytes.items():
            totals[link[end]] += n_bytes
        return totals

    def play(self, until: int) -> None:
        """Rounds of every worker until it has done so many steps; all start together.

        Raises:
            RunError: Workers wait for what never comes, or do not fit together.
        """
        self._until, self._n_active = until, len(self._players)
        if len(self._players) > self._n:
            self._play_on()
            return
        for player in self._players:
            self.clock.at(self.clock.now_s, self._begin, player)
        while self._n_active:
            if not self.clock.step():
                raise self._deadlock()
        for player in self._players:
            player.spent.wait_s += self.clock.now_s - player.since_s

    def _placed(self) -> list[int]:
        """Whose machine each player is on."""
        players = range(len(self._players))
        if len(players) == self._n:
            return list(players)
        return [self.algorithm.sync.machine(player, self._n) for player in players]

    def _play_on(self) -> None:
        """The clock goes on until servers told of so many batches of each worker, in the mean."""
        if not self._going:
            self._going = True
            for player in self._players:
                self.clock.at(self.clock.now_s, self._begin, player)
        while self._recorded < self._until * self._n:
            if not self.clock.step():
                raise self._deadlock()

    def drain(self) -> None:
        """What is computed is pushed, what is under way comes, and no worker begins anything.

        What comes so is not counted: the steps that are done stay those that were.
        """
        self._draining, recorded = True, self._recorded
        while self.clock.step():
            pass
        for player in self._players:
            if player.program is not None:
                if player.begun:
                    raise self._deadlock()
                player.program.close()
            player.spent.wait_s += self.clock.now_s - player.since_s
            player.program = player.blocked = None
        self._draining = self._going = False
        self._recorded = recorded

    def _deadlock(self) -> Exception:
        waiting = [(p.me.rank, p.state["step"] + 1, p.blocked) for p in self._players]
        return stuck.deadlock(waiting, self.clock.now_s)

    def _begin(self, player: _Player) -> None:
        if self._going or player.state["step"] < self._until:
            player.program = self.algorithm.sync.round(self.algorithm, player.state, player.me)
            player.begun = False
            self._go_on(player, None)
        else:
            self._n_active -= 1
            player.since_s = self.clock.now_s

    def _go_on(self, player: _Player, answer: Any) -> None:
        """Play a worker until it waits for something."""
        player.blocked = None
        while True:
            try:
                effect = player.program.send(answer)
            except StopIteration as end:
                player.program, player.state = None, end.value
                self.clock.at(self.clock.now_s, self._begin, player)
                return
            if self._draining and not player.begun and not isinstance(effect, Recv):
                player.program.close()
                player.program, player.since_s = None, self.clock.now_s
                return
            answer = None
            if isinstance(effect, Send):
                self._send(player, effect)
            elif isinstance(effect, Recv):
                answer = self._receive(player, effect)
                if answer is None:
                    return
                player.begun = True
            elif isinstance(effect, SumShards):
                answer = effect.partial
            elif isinstance(effect, Record):
                self._recorded += player.me.rank >= self._n
                if self._on_record is not None:
                    self._on_record(player.me, effect, self.clock.now_s)
            elif isinstance(effect, Now):
                answer = self.clock.now_s
            elif isinstance(effect, Members):
                answer = tuple(range(player.me.n))
            else:
                self._wait(player, effect)
                return

    def _wait(self, player: _Player, effect: Effect) -> None:
        player.blocked, player.since_s, player.begun = effect, self.clock.now_s, True
        if isinstance(effect, Compute):
            me = player.me
            self._asked[me.rank] = effect
            seconds = self.compute.gradient_s(me.rank, me.n, effect.batch, self.seed)
            player.spent.compute_s += seconds
            self.clock.at(self.clock.now_s + seconds, self._computed, player)
        elif isinstance(effect, Sleep):
            player.spent.wait_s += effect.seconds
            self.clock.at(self.clock.now_s + effect.seconds, self._go_on, player, None)
        else:
            assert isinstance(effect, Agree | Combine | Sum), f"{effect} is no effect"
            self._meet(player)

    def _computed(self, player: _Player) -> None:
        """Go on with a gradient; the first that is due is computed with all that were asked for."""
        rank = player.me.rank
        if rank in self._asked:
            asked, self._asked = self._asked, {}
            each = [(other, effect.params, effect.batch) for other, effect in asked.items()]
            self._found |= zip(asked, self._together(each), strict=True)
        self._go_on(player, self._found.pop(rank))

    def _one_by_one(self, asked: Sequence[tuple[int, torch.Tensor, int]]) -> list[Computed]:
        return [self.gradients(*each) for each in asked]

    def _meet(self, player: _Player) -> None:
        """Wait for all others at the same effect; the last to come answers all."""
        self._met.append(player)
        if len(self._met) < len(self._players):
            return
        self._met.clear()
        answer, seconds = self._answered([each.blocked for each in self._players])
        now_s = self.clock.now_s
        for each in self._players:
            each.spent.wait_s += now_s - each.since_s
            each.spent.comm_s += seconds
            self.clock.at(now_s + seconds, self._go_on, each, answer)

    def _answered(self, effects: list[Any]) -> tuple[Any, float]:
        """The answer to what all workers ask at once, and the seconds that it takes."""
        first = effects[0]
        if any(type(each) is not type(first) for each in effects):
            raise self._apart()
        if isinstance(first, Agree):
            if len({len(each.batches) for each in effects}) > 1:
                raise self._apart()
            told = [each.batches for each in effects]
            return Seen.of(told), self._gathering_s([8 * sum(map(len, each)) for each in told])
        messages = [each.message for each in effects]
        if any(each.kinds != messages[0].kinds for each in messages):
            raise self._apart()
        if isinstance(first, Sum):
            return total(messages), self._summing_s(messages[0])
        return first.function(messages), self._gathering_s([each.nbytes for each in messages])

    def _gathering_s(self, sizes: list[int]) -> float:
        """Count what all workers give to all; the seconds that takes."""
        self.ledger.gathered(sizes)
        return self.network.gathering_s(sizes)

    def _summing_s(self, message: Message) -> float:
        """Count the shares that go round twice, type by type; the seconds that takes."""
        n, seconds = len(self._players), 0.0
        for part in vector(message):
            share_bytes = share_of(part.numel(), n) * part.element_size()
            self.ledger.summed(share_bytes, n)
            seconds += 2 * self.network.gathering_s([share_bytes] * n)
        return seconds

    def _apart(self) -> Exception:
        return stuck.apart([(each.me.rank, each.blocked) for each in self._players if each.blocked])

    def _send(self, player: _Player, effect: Send) -> None:
        received = Received(source=player.me.rank, message=effect.message)
        mail = Mail(received=received, sent_s=self.clock.now_s)
        if self.algorithm.sync.in_memory:
            self.clock.at(self.clock.now_s, self._deliver, effect.to, mail)
            return
        n_bytes = effect.message.nbytes
        if self._machines[player.me.rank] != self._machines[effect.to]:
            self.ledger.sent(player.me.rank, effect.to, n_bytes)
        self._links.send(effect.to, n_bytes, mail)

    def _deliver(self, to: int, mail: Mail) -> None:
        player = self._players[to]
        wants = player.blocked
        if not isinstance(wants, Recv) or wants.source not in (ANY, mail.received.source):
            player.inbox.append(mail)
            return
        waited_s = max(mail.sent_s - player.since_s, 0.0)
        player.spent.wait_s += waited_s
        player.spent.comm_s += self.clock.now_s - player.since_s - waited_s
        player.begun = True
        self._go_on(player, self._read(player, wants, mail))

    def _receive(self, player: _Player, effect: Recv) -> Received | None:
        """The first message that came of those that are wanted; if there is none, wait."""
        for index, mail in enumerate(player.inbox):
            if effect.source in (ANY, mail.received.source):
                del player.inbox[index]
                return self._read(player, effect, mail)
        player.blocked, player.since_s = effect, self.clock.now_s
        player.n_waits += 1
        if effect.timeout_s is not None and not (self._draining and not player.begun):
            when_s = self.clock.now_s + effect.timeout_s
            self.clock.at(when_s, self._give_up, player, player.n_waits)
        return None

    def _read(self, player: _Player, effect: Recv, mail: Mail) -> Received:
        kinds = mail.received.message.kinds
        if kinds != effect.kinds:
            raise stuck.unlike(player.me.rank, mail.received.source, effect.kinds, kinds)
        return mail.received

    def _give_up(self, player: _Player, number: int) -> None:
        if isinstance(player.blocked, Recv) and player.n_waits == number:
            player.spent.wait_s += self.clock.now_s - player.since_s
            player.begun = True
            self._go_on(player, None)
