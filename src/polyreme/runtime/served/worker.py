"""A worker: plays its part of the algorithm, and keeps its pushes until servers have them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from safetensors.torch import save

from ...algo.compose import DataParallel
from ...algo.effects import Compute, Computed, Local, Received, Recv, Send, SumShards
from ...algo.packet import from_bytes, to_bytes
from ...algo.push import HELLO
from ...algo.sync.kind import State
from ...algo.sync.served import Served
from ...algo.worker import Worker
from ..own import apart
from ..transport.letters import Kind, Letter
from ..transport.local import HOME, Address, Boxes

_ASK_S = 0.5
_ASK_MOST_S = 5.0


class Gradient(Protocol):
    """The gradients of this worker's batches."""

    def __call__(self, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a batch at these parameters."""


class Over(Exception):
    """Home says that all is over."""


@dataclass(kw_only=True)
class _Way:
    """To one server: pushes that it may not have, the number of the last, the last answered.

    `greets` says that it was sent no push yet, but a HELLO.
    """

    kept: deque[tuple[int, Any]] = field(default_factory=deque)
    last: int = -1
    answered: int = -2
    greets: bool = False
    answers: deque[Any] = field(default_factory=deque)


@dataclass(kw_only=True)
class Player:
    """One worker of a run, on letters to servers and home.

    `buffers` gives what the model keeps beside parameters (running means), for home. A worker waits
    for one answer at a time; while none comes it asks where its push is, more and more seldom.
    """

    sync: Served
    algorithm: DataParallel
    me: Worker
    state: State
    gradients: Gradient
    buffers: Callable[[], Sequence[torch.Tensor]]
    address: Address
    life: int
    compute_s: float = 0.0
    blocked_s: float = 0.0
    sent_bytes: int = 0

    def play(self) -> None:
        """Until home says that all is over."""
        servers = [self.me.n + at for at in range(self.sync.servers)]
        self._ways = {server: _Way() for server in servers}
        self._boxes = Boxes(self.address, self.me.rank, [HOME, *servers])
        self._resting = False
        packs = self.sync.answers(self.algorithm).packs
        self._takes_all = packs or self.sync.by_version
        self._send_home(Kind.UP)
        try:
            while True:
                step = self.state["step"]
                self._round()
                if self.state["step"] != step:  # not of an answer alone
                    self._did()
                self._listen()
        except Over:
            self._boxes.close(linger_s=1.0)

    # Rounds -------------------------------------------------------------------------------------

    def _round(self) -> None:
        program = self.sync.round(self.algorithm, self.state, self.me)
        answer: Any = None
        while True:
            try:
                effect = program.send(answer)
            except StopIteration as end:
                self.state = end.value
                return
            answer = None
            if isinstance(effect, Compute):
                start_s = time.perf_counter()
                answer = self.gradients(effect.params, effect.batch)
                self.compute_s += time.perf_counter() - start_s
            elif isinstance(effect, Local):
                start_s = time.perf_counter()
                answer = effect.work()
                self.compute_s += time.perf_counter() - start_s
            elif isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Recv):
                answer = self._wait(effect)
            else:
                assert isinstance(effect, SumShards), f"{effect} is none of a worker"
                answer = effect.partial

    def _send(self, effect: Send) -> None:
        way = self._ways[effect.to]
        if effect.message.packets[0].decode()[0] == HELLO:
            way.greets = True
            self._boxes.send(effect.to, Letter(Kind.HELLO, self.me.rank, self.life))
            return
        body = to_bytes(effect.message).cpu().numpy().data
        self.sent_bytes += len(body)
        self._post(effect.to, body)

    def _post(self, to: int, body: bytes | memoryview) -> None:
        """Send a push, which is kept until the server is known to have it."""
        way = self._ways[to]
        way.last += 1
        way.kept.append((way.last, body))
        self._boxes.send(to, Letter(Kind.PUSH, self.me.rank, self.life, way.last, 0, body))

    def _wait(self, effect: Recv) -> Received | None:
        """The answer of a server; what others send meanwhile is kept.

        Without a wait it is one that is there, or None.
        """
        way, start_s, patience_s = self._ways[effect.source], time.perf_counter(), _ASK_S
        if effect.timeout_s is not None:
            assert not effect.timeout_s, "nothing else is asked for"
            self._listen()
            return self._read(way, effect) if way.answers else None
        ask_s = start_s + patience_s
        while not way.answers:
            letter = self._boxes.take(_ASK_S)
            if letter is not None:
                self._took(letter)
                continue
            self._send_home(Kind.UP)
            if time.perf_counter() < ask_s:
                continue
            kind = Kind.HELLO if way.greets else Kind.ASK
            self._boxes.send(effect.source, Letter(kind, self.me.rank, self.life, way.last))
            patience_s = min(2 * patience_s, _ASK_MOST_S)
            ask_s = time.perf_counter() + patience_s
        self.blocked_s += time.perf_counter() - start_s
        return self._read(way, effect)

    def _read(self, way: _Way, effect: Recv) -> Received:
        body = way.answers.popleft()
        data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        message = from_bytes(data.to(self.state["params"].device), effect.kinds)
        return Received(source=effect.source, message=message)

    # Letters ------------------------------------------------------------------------------------

    def _took(self, letter: Letter) -> None:
        if letter.source == HOME:
            self._heard(letter)
            return
        way = self._ways[letter.source]
        while way.kept and way.kept[0][0] <= letter.covered:
            way.kept.popleft()
        if letter.kind is Kind.ANSWER:
            # Some answers say themselves on what they follow.
            if self._takes_all or way.answered < letter.number <= way.last:
                way.answered, way.greets = letter.number, False
                way.answers.append(letter.body)
        elif letter.kind is Kind.HAVE:
            for number, body in way.kept:
                if number > letter.number:
                    self._boxes.send(
                        letter.source,
                        Letter(Kind.PUSH, self.me.rank, self.life, number, 0, body),
                    )

    def _heard(self, letter: Letter) -> None:
        """What home wants."""
        if letter.kind is Kind.END:
            raise Over
        if letter.kind in (Kind.REST, Kind.GO):
            self._resting = letter.kind is Kind.REST
            if self._resting:
                lasts = {f"last/{server}": torch.tensor(w.last) for server, w in self._ways.items()}
                self._send_home(Kind.HERE, save(lasts | apart(self.state)), letter.covered)

    def _listen(self) -> None:
        """Letters that are there; while home wants rest, all that come."""
        while (letter := self._boxes.take(None if self._resting else 0.0)) is not None:
            self._took(letter)

    def _did(self) -> None:
        """Tell home how far it is, and what the model keeps."""
        told = {
            "spent": torch.tensor(
                [self.state["step"], self.compute_s, self.blocked_s, self.sent_bytes],
                dtype=torch.float64,
            ),
            **{f"buffer/{at}": each.clone() for at, each in enumerate(self.buffers())},
        }
        self._send_home(Kind.DID, save(told))

    def _send_home(self, kind: Kind, body: bytes = b"", asked: int = 0) -> None:
        self._boxes.send(HOME, Letter(kind, self.me.rank, self.life, 0, asked, body))
