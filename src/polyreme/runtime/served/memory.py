"""Memory that the workers of a run share, and change themselves without locks."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple

import numpy as np
import torch

from ...algo.compose import DataParallel
from ...algo.effects import Numbers, alone
from ...algo.push import Push
from ...algo.sync.hogwild import Hogwild
from ...algo.sync.kind import State
from ...algo.worker import Worker
from ...errors import RunError

_LINE = 64  # bytes; what two workers write for themselves lies in no cache line together
_NOTE = struct.Struct("<qq?dq4d")


class Note(NamedTuple):
    """What a worker tells of an update that it made.

    `version` is that of the parameters that it began with, `taken` says whether it was applied.
    """

    version: int
    delay: int
    taken: bool
    lr: float
    step: int
    row: Numbers

    def packed(self) -> bytes:
        """As it travels."""
        return _NOTE.pack(*self[:-1], *self.row)

    @staticmethod
    def opened(body: bytes | memoryview) -> Note:
        """From what `packed` gave."""
        version, delay, taken, lr, step, *row = _NOTE.unpack(body)
        return Note(version, delay, taken, lr, step, Numbers(*row))


class Memory:
    """A server's state in a file that processes map: its parameters, and what the rule keeps.

    Vectors are read and written without locks. Numbers (version, step, counts of the rule) are sums
    over workers, each of which has a row that it alone writes to: no race loses one. The last row
    is of what the memory began with. `like` is a state of the same form.
    """

    def __init__(self, file: int, like: State, n: int) -> None:
        counts, vectors = _counts(like), _vectors(like)
        held = mmap.mmap(file, n_bytes(like, n))
        self._like, self._names = like, tuple(counts)
        self._rows = np.frombuffer(held, np.int64, (n + 1) * _width(counts)).reshape(n + 1, -1)
        self._vectors, at = {}, self._rows.nbytes
        for name, vector in vectors.items():
            self._vectors[name] = torch.frombuffer(
                held, dtype=vector.dtype, count=vector.numel(), offset=at
            )
            at += _lines(vector.nbytes)

    def fill(self, state: State) -> None:
        """Begin with a state."""
        counts = _counts(state)
        self._rows[-1, : len(counts)] = list(counts.values())
        for name, vector in _vectors(state).items():
            self._vectors[name].copy_(vector)

    def state(self) -> State:
        """The state now: vectors are the memory itself, numbers from before these are read."""
        total = self._rows.sum(0).tolist()
        numbers = dict(zip(self._names, total, strict=False))
        held = {**numbers, **self._vectors}
        rule = {key: held[f"rule/{key}"] for key in self._like["rule"]}
        return {
            **self._like,
            **{key: held[key] for key in ("params", "step", "version")},
            "rule": rule,
        }

    def update(self, sync: Hogwild, algorithm: DataParallel, push: Push, server: Worker) -> Note:
        """Apply a push of a worker, who calls it itself; `server` is the player it was sent to.

        An entry that stays as it is, is not written to. The worker's row is written last: what a
        worker that is killed meanwhile has changed is in the vectors and not in the numbers.
        """
        state = self.state()
        step = state["step"] // server.n * sync.per_push
        lr, delay, after = server.lr(step), state["version"] - push.version, state
        if push.counts:
            delta, rule = alone(sync.change(algorithm, state, push, lr, server))
            _add(state["params"], delta)
            after = {**state, "rule": rule, "version": state["version"] + 1}
            for name, vector in _vectors(after).items():
                if name != "params":
                    _write(self._vectors[name], vector)
        before, now = _counts(state), _counts({**after, "step": state["step"] + 1})
        self._rows[push.worker, : len(now)] += [now[name] - before[name] for name in self._names]
        row = push.rows[0] if push.counts else push.rows[0]._replace(weight=0.0)
        return Note(push.version, delay, push.counts, lr, step + 1, row)


@contextmanager
def shared(state: State, n: int) -> Iterator[int]:
    """A file without a name for `Memory`, filled; gone with the last process that has it.

    Raises RunError where there is no room for it.
    """
    size = n_bytes(state, n)
    with _nameless() as file:
        try:
            if sys.platform == "linux":
                os.posix_fallocate(file.fileno(), 0, size)  # a full host says so here, not later
            else:
                file.truncate(size)
        except OSError as error:
            raise RunError(f"no room for {size} bytes that workers share: {error}") from error
        Memory(file.fileno(), state, n).fill(state)
        yield file.fileno()


def _nameless() -> IO[bytes]:
    if sys.platform == "linux":  # where it is memory alone, never written to a disk
        return os.fdopen(os.memfd_create("polyreme"), "r+b")
    return tempfile.TemporaryFile()


def n_bytes(like: State, n: int) -> int:
    """Bytes of the memory of such a state and n workers."""
    vectors = sum(_lines(vector.nbytes) for vector in _vectors(like).values())
    return (n + 1) * _width(_counts(like)) * 8 + vectors


def _counts(state: State) -> dict[str, int]:
    rule = {f"rule/{k}": v for k, v in state["rule"].items() if not isinstance(v, torch.Tensor)}
    return {"step": state["step"], "version": state["version"], **rule}


def _vectors(state: State) -> dict[str, torch.Tensor]:
    rule = {f"rule/{k}": v for k, v in state["rule"].items() if isinstance(v, torch.Tensor)}
    return {"params": state["params"], **rule}


def _lines(size: int) -> int:
    """Bytes of whole cache lines that hold so many."""
    return -(-size // _LINE) * _LINE


def _width(counts: dict[str, int]) -> int:
    """Numbers of a row."""
    return _lines(8 * len(counts)) // 8


def _add(held: torch.Tensor, delta: torch.Tensor) -> None:
    """Add in place, to entries alone of which something is to be added."""
    moves = delta != 0
    if moves.all():
        held.add_(delta)
    else:
        np.add(held.numpy(), delta.numpy(), out=held.numpy(), where=moves.numpy())


def _write(held: torch.Tensor, after: torch.Tensor) -> None:
    """Write in place, to entries alone that are others now."""
    np.copyto(held.numpy(), after.numpy(), where=(held != after).numpy())
