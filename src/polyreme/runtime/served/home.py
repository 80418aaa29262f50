"""Home: begins workers and servers, hears what they tell, and begins those anew that are killed."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from safetensors.torch import load

from ...algo.effects import Numbers
from ...errors import RunError
from ..transport.letters import Kind, Letter
from ..transport.local import HOME, Address, Office
from .nursery import Ended, Nursery
from .server import SUSPECT, TOLD

if TYPE_CHECKING:
    import torch

MOST_LIVES = 100
_TURN_S = 0.02
_END_S = 5.0


@dataclass(kw_only=True)
class _Member:
    """One worker or server: how often it was begun, when it was last heard of, what it told."""

    life: int = 0
    heard_s: float = field(default_factory=time.monotonic)
    silent: bool = False
    told: int = 0


class Told(NamedTuple):
    """What a server told of a batch, and when that came; suspects are those told of before it."""

    worker: int
    delay: int
    step: int
    lr: float
    row: Numbers
    came_s: float
    suspects: tuple[int, ...]


class Spent(NamedTuple):
    """Of one worker: its batches, seconds in gradients and of waiting, bytes that it sent."""

    step: float = 0.0
    compute_s: float = 0.0
    blocked_s: float = 0.0
    sent_bytes: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """Both, at the later's batch."""
        return Spent(
            max(self.step, other.step),
            self.compute_s + other.compute_s,
            self.blocked_s + other.blocked_s,
            self.sent_bytes + other.sent_bytes,
        )


class Home:
    """Knows all members of a run; a thread of its own takes their letters.

    Members that are killed are begun anew; servers are told of workers that are gone, or have been
    silent for `timeout_s`. One that ends by an error of its own ends the run.
    """

    def __init__(
        self,
        nursery: Nursery,
        address: Address,
        *,
        n: int,
        servers: int,
        begin: Callable[[int, int, int], None],
        timeout_s: float,
    ) -> None:
        self._nursery, self._begin, self._timeout_s = nursery, begin, timeout_s
        self.folder = address.folder
        self.n, self.servers = n, range(n, n + servers)
        self.members = {rank: _Member() for rank in range(n + servers)}
        self.told: SimpleQueue[Told] = SimpleQueue()
        self._suspects: list[int] = []
        self.here: SimpleQueue[Letter] = SimpleQueue()
        self.spent: dict[int, Spent] = {}
        self.before: dict[int, Spent] = {}
        self.buffers: dict[int, list[torch.Tensor]] = {}
        self.error: RunError | None = None
        self.faults: SimpleQueue[tuple[int, str]] = SimpleQueue()
        self._out: SimpleQueue[tuple[int, Letter]] = SimpleQueue()
        self._over = False
        self._office = Office(address, HOME)
        for rank in self.members:
            begin(rank, 0, -1)
        self._thread = threading.Thread(target=self._run, name="home", daemon=True)
        self._thread.start()

    def total(self, worker: int) -> Spent:
        """What a worker spent in all its lives."""
        return self.before.get(worker, Spent()).plus(self.spent.get(worker, Spent()))

    def send(self, to: int, letter: Letter) -> None:
        """Have a letter sent."""
        self._out.put((to, letter))

    def leave(self, worker: int) -> None:
        """Have servers told that a worker does not answer; it is back with its next letter."""
        self.members[worker].silent = True
        for server in self.servers:
            left = Letter(Kind.LEFT, HOME, 0, worker, self.members[worker].life)
            self._out.put((server, left))

    def check(self) -> None:
        """Raise RunError if the run cannot go on."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End all members, and wait a while for them."""
        self._over = True
        self._thread.join()
        end_s = time.monotonic() + _END_S
        for rank in self.members:
            self._office.send(rank, Letter(Kind.END, HOME))
        with suppress(EOFError, OSError):  # the nursery is gone, and all with it
            while self._nursery.processes and time.monotonic() < end_s:
                self._nursery.ended()
                time.sleep(_TURN_S)
        self._office.close()

    def _run(self) -> None:
        try:
            while not self._over:
                letter = self._office.take(_TURN_S)
                if letter is not None:
                    self._took(letter)
                while not self._out.empty():
                    to, sent = self._out.get()
                    self._office.send(to, sent)
                for ended in self._nursery.ended():
                    self._lost(ended)
                self._look()
        except RunError as error:
            self.error = error
        except (EOFError, OSError):
            self.error = RunError("the process that workers are forked from was killed")

    def _took(self, letter: Letter) -> None:
        member = self.members[letter.source]
        if letter.life != member.life:
            return
        member.heard_s, member.silent = time.monotonic(), False
        if letter.kind is Kind.UP:
            self._tell_again(letter.source)
            if letter.source in self.servers:  # what an earlier life was told may be lost with it
                for worker in range(self.n):
                    if self.members[worker].silent:
                        self._tell_left(worker, [letter.source])
        elif letter.kind is Kind.TOLD and letter.number >= member.told:
            member.told = letter.number + 1  # a server that went back tells some again
            self._heard(letter.body, member.heard_s)
        elif letter.kind is Kind.DID:
            found = load(bytes(letter.body))
            self.spent[letter.source] = Spent(*found.pop("spent").tolist())
            if letter.source < self.n:
                self.buffers[letter.source] = [found[f"buffer/{at}"] for at in range(len(found))]
        elif letter.kind is Kind.HERE:
            if letter.number < 0:
                sys.stderr.write("polyreme: a server refused a letter without the run's token\n")
            else:
                self.here.put(letter)

    def _heard(self, body: bytes | memoryview, came_s: float) -> None:
        """What a server told; suspects are told of with the next batch."""
        for worker, delay, step, lr, *row in TOLD.iter_unpack(body):
            if step == SUSPECT:
                self._suspects.append(worker)
                continue
            suspects, self._suspects = tuple(self._suspects), []
            self.told.put(Told(worker, delay, step, lr, Numbers(*row), came_s, suspects))

    def _lost(self, ended: Ended) -> None:
        """Begin a member anew that was killed."""
        rank, member = ended.member, self.members[ended.member]
        who = f"worker {rank}" if rank < self.n else f"server {rank - self.n}"
        if ended.code >= 0:
            raise RunError(
                f"{who} ended with code {ended.code}; its last words:\n{ended.words}", rank=rank
            )
        name = signal.Signals(-ended.code).name
        if member.life + 1 >= MOST_LIVES:
            raise RunError(f"{who} was killed {MOST_LIVES} times, the last by {name}", rank=rank)
        self.faults.put((rank, f"{who} was killed by {name} and is begun anew"))
        sys.stderr.write(f"polyreme: {who} was killed by {name}; it is begun anew\n")
        if rank < self.n:
            self._tell_left(rank)
        member.life, member.heard_s = member.life + 1, time.monotonic()
        if rank >= self.n:
            for other in self.members:
                self._tell_again(other)
        spent = self.spent.pop(rank, Spent())
        self.before[rank] = self.before.get(rank, Spent()).plus(spent)
        self._begin(rank, member.life, int(self.before[rank].step))

    def _look(self) -> None:
        """Tell servers of workers that have been silent for too long."""
        now_s = time.monotonic()
        for rank in range(self.n):
            member = self.members[rank]
            if not member.silent and now_s - member.heard_s > self._timeout_s:
                member.silent = True
                sys.stderr.write(
                    f"polyreme: worker {rank} has been silent for {self._timeout_s:g} s; "
                    "others go on without it\n"
                )
                self._tell_left(rank)

    def _tell_again(self, to: int) -> None:
        for server in self.servers:
            if life := self.members[server].life:
                self._office.send(to, Letter(Kind.AGAIN, HOME, 0, server, life))

    def _tell_left(self, worker: int, servers: Sequence[int] | None = None) -> None:
        for server in self.servers if servers is None else servers:
            life = self.members[worker].life
            self._office.send(server, Letter(Kind.LEFT, HOME, 0, worker, life))


def loaded(letter: Letter) -> Mapping[str, torch.Tensor]:
    """The tensors that a letter brings."""
    return load(bytes(letter.body))
