"""Workers that change what they share themselves, and the server that lists what they did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...algo.effects import Received, Recv, Send
from ...algo.push import HELLO
from ...algo.sync.hogwild import Hogwild
from ...algo.sync.kind import State
from ...algo.sync.served import Served
from ...algo.worker import Worker
from ..transport.letters import Kind, Letter
from ..transport.local import Address
from .memory import Memory, Note
from .server import TOLD, Known, Server
from .worker import Player

_ACKNOWLEDGED = 64
"""After so many of its letters a worker is told that it need not keep them."""


@dataclass(kw_only=True)
class Writer(Player):
    """A worker whose pushes are updates of the memory, told of in a letter; nobody answers.

    `server` is the player whose part it plays.
    """

    sync: Hogwild
    memory: Memory
    server: Worker

    def _send(self, effect: Send) -> None:
        received = Received(source=self.me.rank, message=effect.message)
        push = self.sync.form(self.algorithm).read(received)
        if push.number != HELLO:  # which asks for what the memory has
            note = self.memory.update(self.sync, self.algorithm, push, self.server)
            self._post(effect.to, note.packed())

    def _wait(self, effect: Recv) -> Received:
        """What the memory has now."""
        state = self.memory.state()
        state = {**state, "params": state["params"].clone()}
        message, _ = self.sync.reply(self.algorithm, state, self.me.rank, self.server)
        return Received(source=effect.source, message=message)


@dataclass(kw_only=True)
class Clerk(Server):
    """A server that lists and tells of updates, in the order in which it hears of them.

    The memory is not its own: one that is killed loses none of it, nor of what it wrote down.
    """

    memory: Memory

    def _whole(self) -> State:
        return self.memory.state()

    def _deal(self, letter: Letter) -> None:
        note = Note.opened(letter.body)
        if note.taken:
            self._list.add(letter.source, letter.life, letter.number, note.version)
        self._tell(TOLD.pack(letter.source, note.delay, note.step, note.lr, *note.row))
        if letter.number % _ACKNOWLEDGED == _ACKNOWLEDGED - 1 and not self._again:
            taken = Letter(Kind.TAKEN, self.me.rank, self.life, 0, letter.number)
            self._office.send(letter.source, taken)

    def _ask(self, number: int, worker: int, known: Known) -> None:
        """What came before is known."""

    def _left(self, worker: int, life: int) -> None:
        """Nobody is waited for."""


def roles(
    sync: Served, address: Address, server: Worker, state: State
) -> tuple[Callable[..., Player], Callable[..., Server]]:
    """What plays a worker and what a server of a sync, given all else that these need.

    `server` is the first of them, `state` one of its form.
    """
    if not isinstance(sync, Hogwild):
        return partial(Player, sync=sync), partial(Server, sync=sync)
    assert address.memory is not None, "a run of workers that share memory has one"
    memory = Memory(address.memory, state, server.n)
    return (
        partial(Writer, sync=sync, memory=memory, server=server),
        partial(Clerk, sync=sync, memory=memory),
    )
