"""Letters between processes of one host, over sockets in a folder that only its owner can enter."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq

from .letters import Letter, opened

HOME = -1


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the members of a run meet, and the token that their letters have.

    `memory` is the file of what they share, if they do: a descriptor that all of them have.
    """

    folder: Path
    token: bytes
    memory: int | None = None

    def of(self, member: int) -> str:
        """Where a member takes letters: a server by its number, or home."""
        return f"ipc://{self.folder / ('home' if member == HOME else str(member))}"

    def name(self, member: int) -> bytes:
        """What a member's sockets are called; who has no token cannot take the name of another."""
        return b"member %d " % member + hmac.digest(self.token, b"%d" % member, "sha256")[:8]


class Office:
    """Takes letters from all who have the token, and answers them. A context manager.

    Letters to those who are not connected are dropped, as are those that have another token:
    `on_refused` is told of each.
    """

    def __init__(
        self, address: Address, member: int, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address, self._on_refused = address, on_refused
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who comes back has the same name
        self._socket.bind(address.of(member))

    def __enter__(self) -> Office:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, linger_s: float = 0.0) -> None:
        """Close, waiting so long for letters that are on their way."""
        self._socket.close(linger=int(1000 * linger_s))
        self._context.term()

    def send(self, to: int, letter: Letter) -> None:
        """Send to a member that has written before, or will have come by."""
        parts = letter.packed(self._address.token)
        self._socket.send_multipart([self._address.name(to), *parts], copy=len(parts[1]) < 65536)

    def take(self, wait_s: float | None) -> Letter | None:
        """The next letter; None after so many seconds."""
        while self._socket.poll(None if wait_s is None else int(1000 * wait_s)):
            name, *parts = self._socket.recv_multipart(copy=False)
            letter = opened([part.buffer for part in parts], self._address.token)
            if letter is not None and self._address.name(letter.source) == name.bytes:
                return letter
            self._on_refused()
        return None


class Boxes:
    """One member's way to offices, letters from which come in one after another.

    There is a way to `offices` from the start, to others from when they are first written to.
    """

    def __init__(self, address: Address, member: int, offices: Sequence[int]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._token = address.token
        self._address, self._member = address, member
        self._poller = zmq.Poller()
        self._sockets: dict[int, Any] = {}
        for office in offices:
            self._connect(office)

    def _connect(self, office: int) -> None:
        socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        socket.setsockopt(zmq.IDENTITY, self._address.name(self._member))
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.connect(self._address.of(office))
        self._sockets[office] = socket
        self._poller.register(socket, zmq.POLLIN)

    def close(self, linger_s: float = 0.0) -> None:
        """Close, waiting so long for letters that are on their way."""
        for socket in self._sockets.values():
            socket.close(linger=int(1000 * linger_s))
        self._context.term()

    def send(self, to: int, letter: Letter) -> None:
        """Send; if the office is not there it is sent once it is."""
        if to not in self._sockets:
            self._connect(to)
        parts = letter.packed(self._token)
        self._sockets[to].send_multipart(parts, copy=len(parts[1]) < 65536)

    def take(self, wait_s: float | None) -> Letter | None:
        """The next letter from any office; None after so many seconds."""
        while self._poller.poll(None if wait_s is None else int(1000 * wait_s)):
            for socket in self._sockets.values():
                if socket.poll(0):
                    parts = socket.recv_multipart(copy=False)
                    letter = opened([part.buffer for part in parts], self._token)
                    if letter is not None:
                        return letter
        return None
