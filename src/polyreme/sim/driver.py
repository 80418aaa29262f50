"""Plays the programs of all workers on a virtual clock, in one process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..algo.attacking import silent
from ..algo.compose import DataParallel
from ..algo.effects import (
    Agree,
    Combine,
    Compute,
    Computed,
    Effect,
    Local,
    Members,
    Now,
    Received,
    Record,
    Recv,
    Send,
    Sleep,
    Sum,
    SumShards,
    Suspect,
)
from ..algo.ledger import Ledger
from ..algo.worker import Worker
from . import meeting, stuck
from .clock import Clock
from .compute import Compute as ComputeModel
from .compute import Constant
from .faults import Fault
from .garbage import seldom
from .gradients import Gradients, Together
from .links import Links, Mail
from .lives import Acts, Lives
from .network import Network, Uniform
from .player import Player
from .spent import Spent

if TYPE_CHECKING:
    import torch

_ALIKE, _USUAL = Constant(), Uniform()


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

    `done` steps have been done before. `seed` is of what `compute`, `network` and `faults` draw.
    Faults are for workers that have servers; their seconds count from the clock's beginning, and
    while it drains those that are due happen, but nobody waits for a worker to come back.
    `on_record` is told worker, record and time.
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
        faults: Sequence[Fault] = (),
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
        self._n = workers[0].n
        machines = self._placed(len(workers))
        self._links = Links(
            network, machines, self._n, self.clock, self.ledger, self._deliver, seed
        )
        self._on_record = on_record
        self._players = [Player(me=me, state=s) for me, s in zip(workers, states, strict=True)]
        self._met: list[Player] = []
        self._until = self._n_active = 0
        self._recorded = done * self._n
        self._going = self._draining = False
        self._idle: list[Player] = []
        self._lives: Lives | None = None
        if faults:
            acts = Acts(
                leave=self._leave, come=self._come, notify=self._notify, deliver=self._deliver
            )
            start = states[0]["params"]
            self._lives = Lives(faults, algorithm, workers, start, seed, self.clock, acts)

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

    def _placed(self, n_players: int) -> list[int]:
        """Whose machine each player is on."""
        if n_players == self._n:
            return list(range(n_players))
        return [self.algorithm.sync.machine(player, self._n) for player in range(n_players)]

    def _play_on(self) -> None:
        """The clock goes on until servers told of so many batches of each worker, in the mean."""
        idle, self._idle = self._idle, []
        if not self._going:
            self._going, idle = True, []
            if self._lives is not None:
                self._lives.begin()
            for player in self._players:
                if player.me.rank not in self._gone:
                    self.clock.at(self.clock.now_s, self._begin, player)
        for player in idle:
            self.clock.at(self.clock.now_s, self._begin, player)
        goal, clock, lives = self._until * self._n, self.clock, self._lives
        with seldom():
            while self._recorded < goal:
                stuck_but_for_crashes = lives is not None and clock.n_left == lives.n_crashes
                if stuck_but_for_crashes or not clock.step():
                    raise self._deadlock()

    @property
    def _gone(self) -> Collection[int]:
        return () if self._lives is None else self._lives.gone

    def drain(self) -> None:
        """What is computed is pushed, what is under way comes, and no worker begins anything.

        What comes so is not counted: the steps that are done stay those that were.
        """
        self._draining, recorded, lives = True, self._recorded, self._lives
        while self.clock.n_left > (lives.n_crashes + lives.n_returns if lives else 0):
            self.clock.step()
        for player in self._players:
            if player.program is not None:
                if player.begun:
                    raise self._deadlock()
                player.program.close()
            player.spent.wait_s += self.clock.now_s - player.since_s
            player.since_s = self.clock.now_s
            player.program = player.blocked = None
        self._draining = self._going = False
        self._recorded = recorded

    def _deadlock(self) -> Exception:
        waiting = [(p.me.rank, p.state["step"] + 1, p.blocked) for p in self._players]
        mute = [p.me.rank for p in self._players if silent(p.me)]
        return stuck.deadlock(waiting, self._n, self.clock.now_s, self._gone, mute)

    def _leave(self, rank: int) -> None:
        """A worker loses what it does and has; one that can come back is in its place."""
        assert self._lives is not None
        old, now_s = self._players[rank], self.clock.now_s
        old.left(now_s)
        self._asked.pop(rank, None)
        self._found.pop(rank, None)
        self._players[rank] = Player(
            me=old.me,
            state=self._lives.anew(rank, old.state, old.n_batches),
            since_s=now_s,
            n_batches=old.n_batches,
            spent=old.spent,
        )

    def _come(self, rank: int) -> None:
        player = self._players[rank]
        player.spent.wait_s += self.clock.now_s - player.since_s
        self._begin(player)

    def _begin(self, player: Player) -> None:
        if player.gone:
            return
        if self._going and silent(player.me) and player.state["step"] >= self._until:
            self._idle.append(player)  # others that wait for it wait for ever, which is seen then
        elif self._going or player.state["step"] < self._until:
            player.program = self.algorithm.sync.round(self.algorithm, player.state, player.me)
            player.begun = False
            self._go_on(player, None)
        else:
            self._n_active -= 1
            player.since_s = self.clock.now_s

    def _go_on(self, player: Player, answer: Any) -> None:
        """Play a worker until it waits for something."""
        if player.gone:
            return
        player.blocked = None
        while True:
            try:
                effect = player.program.send(answer)
            except StopIteration as end:
                player.program, player.state = None, end.value
                player.since_s = self.clock.now_s
                self.clock.at(player.since_s, self._begin, player)
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
                if answer is None and player.blocked is not None:
                    return
                player.begun = True
            elif isinstance(effect, SumShards):
                answer = effect.partial
            elif isinstance(effect, Record):
                self._recorded += player.me.rank >= self._n
                if self._on_record is not None:
                    self._on_record(player.me, player.recorded(effect), self.clock.now_s)
            elif isinstance(effect, Suspect):
                self._telling(player).suspects += effect.workers
            elif isinstance(effect, Now):
                answer = self.clock.now_s
            elif isinstance(effect, Members):
                answer = tuple(rank for rank in range(player.me.n) if rank not in self._gone)
            else:
                self._wait(player, effect)
                return

    def _telling(self, player: Player) -> Player:
        """Who records what it found: a worker itself, of servers the first."""
        return self._players[min(player.me.rank, self._n)]

    def _wait(self, player: Player, effect: Effect) -> None:
        player.blocked, player.since_s, player.begun = effect, self.clock.now_s, True
        if isinstance(effect, Compute | Local):
            me, batch = player.me, player.n_batches
            if isinstance(effect, Compute):
                self._asked[me.rank], batch = effect, effect.batch
            player.n_batches = batch + 1
            seconds = self.compute.gradient_s(me.rank, me.n, batch, self.seed)
            player.takes(seconds * getattr(effect, "batches", 1.0), self.clock.now_s)
            self.clock.at(player.until_s, self._computed, player)
        elif isinstance(effect, Sleep):
            player.takes(effect.seconds, self.clock.now_s, waits=True)
            self.clock.at(player.until_s, self._go_on, player, None)
        else:
            assert isinstance(effect, Agree | Combine | Sum), f"{effect} is no effect"
            self._meet(player)

    def _computed(self, player: Player) -> None:
        """Go on with a gradient; the first that is due is computed with all that were asked for."""
        rank, effect = player.me.rank, player.blocked
        if player.gone:
            return
        if rank in self._asked:
            asked, self._asked = self._asked, {}
            each = [(other, effect.params, effect.batch) for other, effect in asked.items()]
            self._found |= zip(asked, self._together(each), strict=True)
        answer = effect.work() if isinstance(effect, Local) else self._found.pop(rank)
        self._go_on(player, answer)

    def _one_by_one(self, asked: Sequence[tuple[int, torch.Tensor, int]]) -> list[Computed]:
        return [self.gradients(*each) for each in asked]

    def _meet(self, player: Player) -> None:
        """Wait for all others at the same effect; the last to come answers all."""
        self._met.append(player)
        if len(self._met) < len(self._players):
            return
        self._met.clear()
        met = [(each.me.rank, each.blocked) for each in self._players]
        answer, seconds = meeting.answered(met, self.network, self.ledger)
        now_s = self.clock.now_s
        for each in self._players:
            each.spent.wait_s += now_s - each.since_s
            each.spent.comm_s += seconds
            self.clock.at(now_s + seconds, self._go_on, each, answer)

    def _send(self, player: Player, effect: Send) -> None:
        source, to, lives = player.me.rank, effect.to, self._lives
        received = Received(source=source, message=effect.message)
        life = 0 if lives is None else lives.life(source, to)
        mail = Mail(received, self.clock.now_s, life, tag=effect.tag)
        self._links.send(to, effect.message.nbytes, mail)

    def _notify(self, to: int, mail: Mail) -> None:
        self._links.send(to, 0, mail)

    def _deliver(self, to: int, mail: Mail) -> None:
        if self._lives is not None and not self._lives.takes(to, mail):
            return
        player = self._players[to]
        wants = player.blocked
        source = mail.received.source
        if not isinstance(wants, Recv) or not wants.wants(source, mail.tag):
            player.inbox.append(mail)
            if not isinstance(wants, Recv) or wants.unless != source:
                return
            answer = None
        else:
            answer = self._read(player, wants, mail)
        waited_s = max(mail.sent_s - player.since_s, 0.0)
        player.spent.wait_s += waited_s
        player.spent.comm_s += self.clock.now_s - player.since_s - waited_s
        player.begun = True
        self._go_on(player, answer)

    def _receive(self, player: Player, effect: Recv) -> Received | None:
        """The first message that came of those that are wanted; if there is none, wait.

        It waits if it is blocked afterwards.
        """
        if effect.tag:
            inbox = player.inbox
            inbox[:] = [m for m in inbox if not effect.drops(m.received.source, m.tag)]
        for index, mail in enumerate(player.inbox):
            if effect.wants(mail.received.source, mail.tag):
                del player.inbox[index]
                return self._read(player, effect, mail)
        if any(mail.received.source == effect.unless for mail in player.inbox):
            return None
        player.blocked, player.since_s = effect, self.clock.now_s
        player.n_waits += 1
        if effect.timeout_s is not None and not (self._draining and not player.begun):
            when_s = self.clock.now_s + effect.timeout_s
            self.clock.at(when_s, self._give_up, player, player.n_waits)
        return None

    def _read(self, player: Player, effect: Recv, mail: Mail) -> Received:
        if self._lives is not None:
            self._lives.hear(player.me.rank, mail)
        kinds = mail.received.message.kinds
        if kinds != effect.kinds and kinds != effect.brief:
            raise stuck.unlike(player.me.rank, mail.received.source, effect.kinds, kinds)
        return mail.received

    def _give_up(self, player: Player, number: int) -> None:
        if isinstance(player.blocked, Recv) and player.n_waits == number:
            player.spent.wait_s += self.clock.now_s - player.since_s
            player.begun = True
            self._go_on(player, None)
