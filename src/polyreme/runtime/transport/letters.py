"""Letters between members: a fixed head, and a body of bytes."""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("<16sBiIqq")
TOKEN_BYTES = 16


class Kind(IntEnum):
    """What a letter is."""

    PUSH = 1
    """Worker to server: its push of that number; in shared memory what is to be known of it."""
    HELLO = 2
    """Worker to server: it is new, and has no parameters."""
    ANSWER = 3
    """Server to worker: parameters; `number` is of the last push that they answer."""
    ASK = 4
    """Worker to server: has the push of that number come, and where is the answer?"""
    HAVE = 5
    """Server to worker: the last push that has come; those that follow are wanted again."""
    LEFT = 6
    """Home to server: a worker is gone; `covered` counts how often it was begun."""
    TOLD = 7
    """Server to home: what came of a push; `number` counts them."""
    DID = 8
    """Worker to home: what a push took, and its buffers."""
    SEND = 9
    """Home to server: send the parameters, or with a number of 1 the whole state."""
    HERE = 10
    """Server or worker to home: what was asked for."""
    REST = 11
    """Home to worker: stop between rounds and send the state."""
    GO = 12
    """Home to worker: go on."""
    END = 13
    """Home to all: end."""
    UP = 14
    """Member to home: it is there."""
    SAID = 15
    """Player to player: a message of the program, `number` counts those of a link."""
    AGAIN = 16
    """Home to members: a server, `number`, was begun anew, for the `covered`-th time."""
    TAKEN = 17
    """Server to worker: what is covered need not be kept; nothing is wanted."""


class Letter(NamedTuple):
    """A letter. `life` counts how often its sender was begun; `covered` is of answers.

    `covered` is the last push of the receiver that the server has written down; with home it
    counts what home asked, so that answers to something earlier are told apart. Of what players
    say it is the tag between workers, else how often the receiver was begun; or, from a worker to a
    server that remembers, the last letter that came from there. In a server's journal it is the
    time, in microseconds.
    """

    kind: Kind
    source: int
    life: int = 0
    number: int = 0
    covered: int = 0
    body: bytes | memoryview = b""

    def packed(self, token: bytes) -> list[bytes | memoryview]:
        """Head and body as they travel."""
        head = _HEAD.pack(token, self.kind, self.source, self.life, self.number, self.covered)
        return [head, self.body]


def opened(parts: list[memoryview], token: bytes) -> Letter | None:
    """The letter in these parts; None if it is none, or was written without the run's token."""
    if len(parts) != 2 or parts[0].nbytes != _HEAD.size:
        return None
    given, kind, source, life, number, covered = _HEAD.unpack(parts[0])
    if not hmac.compare_digest(given, token) or kind not in Kind.__members__.values():
        return None
    return Letter(Kind(kind), source, life, number, covered, parts[1])
