"""What a rank does, kept where others on its host can read it whatever becomes of the rank.

A record is a small file in memory: a header and a ring of the last collectives. Writing to it is
a few stores into mapped memory, so it costs microseconds and survives a kill.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import torch

RECORD = "POLYREME_RECORD"  # names a rank's record in its environment
N_SLOTS = 512  # a step of a large sharded model begins some hundred collectives
N_TOLD = 64
TRAIL_BITS = 52  # what float64 holds exactly
_TRAIL_MASK = 2**TRAIL_BITS - 1
_SPREAD = 0x9E3779B97F4A7  # odd: multiplying by it loses nothing
_WHO = struct.Struct("<IIId")  # rank, process id, phase, when it began (time.time)
_COUNT = struct.Struct("<QQ")  # last sequence number, trail
_WAIT = struct.Struct("<Qd")  # sequence number it waits in (0: none), since when
_PIPE = struct.Struct("<I")
_DOING = struct.Struct("<d56s")
_HOST = struct.Struct("<80s")
_SLOT = struct.Struct("<Qdd136s")  # sequence number, start, end (0: not yet), label
_MESSAGE = struct.Struct("<QdQI4s")  # how many before (0: none), since when, bytes, peer, what
_PIPE_AT, _COUNT_AT, _WAIT_AT, _DOING_AT, _HOST_AT, _MESSAGE_AT, _SLOTS_AT = (
    24,
    32,
    48,
    64,
    128,
    208,
    256,
)
_TIME_AT = struct.Struct("<d")
_END_OFFSET = 16
_FAILED = -1.0  # in place of when the wait began: the collective raised

_Key = tuple[str, "torch.Size | None", "torch.dtype | None", int]
Phase = Literal["starting", "begun", "training"]
_PHASES: tuple[Phase, ...] = ("starting", "begun", "training")


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one rank; `n_ranks` take part. Times are ``time.time``."""

    seq: int
    op: str
    shape: tuple[int, ...]
    dtype: str
    n_ranks: int
    start_s: float
    end_s: float | None

    @property
    def call(self) -> tuple[str, tuple[int, ...], str, int]:
        """What must be the same on all ranks."""
        return self.op, self.shape, self.dtype, self.n_ranks

    def __str__(self) -> str:
        shape = f" {list(self.shape)} {self.dtype}" if self.dtype else ""
        return f"{self.op}{shape} (collective {self.seq})"


class Awaited(msgspec.Struct, frozen=True, kw_only=True):
    """A message between this rank and a peer; `op` is "recv" or "send"."""

    op: str
    peer: int
    n_bytes: int
    start_s: float

    def __str__(self) -> str:
        way = "from" if self.op == "recv" else "to"
        return f"{self.op} of {self.n_bytes:,} bytes {way} rank {self.peer}"


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What a record says of its rank.

    `phase` is "begun" once the run folder is this run's, "training" once steps are done. `waiting`
    is the sequence number of the collective it stands in, 0 outside of any; `message` is the one
    that it waits for, or that is not sent yet. Ranks of one pipeline rank, `pipe`, call the same
    collectives. `state` is of the process: running, stopped, gone,
    or how it ended.
    """

    rank: int
    pipe: int = 0
    pid: int = 0
    host: str = ""
    state: str = "gone"
    phase: Phase = "starting"
    began_s: float = 0.0
    seq: int = 0
    waiting: int = 0
    message: Awaited | None = None
    doing: str = "starting"
    events: tuple[Event, ...] = ()
    stack: str | None = None

    @property
    def stands(self) -> bool:
        """Whether it waits for others."""
        return bool(self.waiting) or self.message is not None

    def event(self, seq: int) -> Event | None:
        """The collective of that number, if it is kept."""
        return next((event for event in self.events if event.seq == seq), None)


class Record:
    """Written by one rank. Without a path it is kept in memory that nobody else sees.

    A collective is begun, waited in and ended; `inside` does all three. An exception leaves it
    as it stood, which tells where it came from. Messages between two ranks have no place in the
    order of collectives, which is the same on all: only the one that is waited for is kept.

    On devices that `lag` behind the host what has ended for the host is done only once the host
    has waited for the device, and it may be held up anywhere before: there a rank stands in its
    newest collective until one that it `settles` has ended.
    """

    lags = False

    def __init__(self, path: Path | None = None, rank: int = 0) -> None:
        size = _SLOTS_AT + N_SLOTS * _SLOT.size
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with path.open("w+b") as file:
                file.truncate(size)
                self._memory = mmap.mmap(file.fileno(), size)
        self.path = path
        self.rank = rank
        self.trail = 0
        self._seq = self._n_messages = 0
        self._doing = ""
        self._began_s = time.time()
        self._labels: dict[_Key, _Label] = {}
        _WHO.pack_into(self._memory, 0, rank, os.getpid(), 0, self._began_s)
        _HOST.pack_into(self._memory, _HOST_AT, socket.gethostname().encode()[:80])
        self._do("starting")

    @property
    def seq(self) -> int:
        """How many collectives were begun."""
        return self._seq

    def enter(self, phase: Phase) -> None:
        """Say how far the run is."""
        number = _PHASES.index(phase)
        _WHO.pack_into(self._memory, 0, self.rank, os.getpid(), number, self._began_s)
        if phase == "training":
            self._do(phase)

    def lies(self, pipe: int) -> None:
        """Say of which pipeline rank this is."""
        _PIPE.pack_into(self._memory, _PIPE_AT, pipe)

    def begin(
        self, op: str, tensor: torch.Tensor | None, n_ranks: int, *, stands: bool = True
    ) -> int:
        """Note the start of a collective; its sequence number.

        Unless it `stands`, the host goes on to other things before it waits for it.
        """
        key: _Key = (op, None, None, n_ranks)
        if tensor is not None:
            key = (op, tensor.shape, tensor.dtype, n_ranks)
        label = self._labels.get(key)
        if label is None:
            label = self._labels[key] = _Label(*key)
        self._seq = seq = self._seq + 1
        self.trail = ((self.trail ^ label.hash) * _SPREAD) & _TRAIL_MASK
        at = _SLOTS_AT + seq % N_SLOTS * _SLOT.size
        _SLOT.pack_into(self._memory, at, seq, time.time(), 0.0, label.text)
        _COUNT.pack_into(self._memory, _COUNT_AT, seq, self.trail)
        if self.lags and stands:
            self.wait(seq)
        return seq

    def wait(self, seq: int) -> None:
        """The host stands still for that collective from here on."""
        _WAIT.pack_into(self._memory, _WAIT_AT, seq, time.time())

    def end(self, seq: int, *, settles: bool = False) -> None:
        """That collective is over for the host; `settles` says that the device has done it too."""
        at = _SLOTS_AT + seq % N_SLOTS * _SLOT.size
        if _SLOT.unpack_from(self._memory, at)[0] == seq:  # else a younger one has its place
            _TIME_AT.pack_into(self._memory, at + _END_OFFSET, time.time())
        if settles or not self.lags:
            _WAIT.pack_into(self._memory, _WAIT_AT, 0, 0.0)

    @contextmanager
    def failing(self, seq: int) -> Iterator[None]:
        """An error of the backend in here is one of that collective."""
        try:
            yield
        except RuntimeError:
            _WAIT.pack_into(self._memory, _WAIT_AT, seq, _FAILED)
            raise

    @contextmanager
    def inside(
        self,
        op: str,
        tensor: torch.Tensor | None = None,
        n_ranks: int = 0,
        *,
        settles: bool = True,
    ) -> Iterator[None]:
        """A collective that the host waits for."""
        seq = self.begin(op, tensor, n_ranks)
        self.wait(seq)
        with self.failing(seq):
            yield
        self.end(seq, settles=settles)

    @contextmanager
    def message(self, op: Literal["recv", "send"], peer: int, n_bytes: int) -> Iterator[None]:
        """The host waits until a message has come from a peer, or gone to it."""
        self._n_messages += 1
        what = (self._n_messages, time.time(), n_bytes, peer, op.encode())
        _MESSAGE.pack_into(self._memory, _MESSAGE_AT, *what)
        with self.failing(self._seq):
            yield
        _MESSAGE.pack_into(self._memory, _MESSAGE_AT, 0, 0.0, 0, 0, b"")

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """What the rank does meanwhile, in words."""
        before = self._doing
        self._do(what)
        yield
        self._do(before)

    def account(self) -> Account:
        """What is written so far."""
        return _account(self._memory, self.rank)

    def _do(self, what: str) -> None:
        self._doing = what
        _DOING.pack_into(self._memory, _DOING_AT, time.time(), what.encode()[:56])


class _Label:
    """The text of a call, and a hash that is the same in all processes."""

    def __init__(
        self, op: str, shape: torch.Size | None, dtype: torch.dtype | None, n_ranks: int
    ) -> None:
        kind = "" if dtype is None else str(dtype).removeprefix("torch.")
        dims = ",".join(map(str, shape or ()))
        text = f"{op[:60]}\t{kind}\t{n_ranks}\t{dims}".encode()
        self.text = text[:136]
        self.hash = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) & _TRAIL_MASK


def read(path: Path, rank: int) -> Account:
    """The account of a rank by its record; one that has none yet is starting."""
    try:
        memory = path.read_bytes()
    except OSError:
        return Account(rank=rank)
    return _account(memory, rank) if len(memory) >= _SLOTS_AT else Account(rank=rank)


def waiting(path: Path) -> tuple[int, Phase]:
    """Where a rank stands, and how far it is; cheap to ask often.

    The number of a collective, minus that of a message, or 0 for neither.
    """
    try:
        with path.open("rb", buffering=0) as file:
            header = file.read(_SLOTS_AT)
    except OSError:
        return 0, "starting"
    if len(header) < _SLOTS_AT:
        return 0, "starting"
    seq: int = _WAIT.unpack_from(header, _WAIT_AT)[0]
    message: int = _MESSAGE.unpack_from(header, _MESSAGE_AT)[0]
    return -message or seq, _PHASES[_WHO.unpack_from(header, 0)[2]]


def failed(path: Path) -> bool:
    """Whether a rank's collective raised an error."""
    try:
        found: float = _WAIT.unpack_from(path.read_bytes(), _WAIT_AT)[1]
    except (OSError, struct.error):
        return False
    return found == _FAILED


def process_state(pid: int) -> str:
    """Running, stopped or gone; as the kernel says, where it says it in /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "running" if pid and _is_there(pid) else "gone"
    letter = status.rpartition(")")[2].split()[0]
    return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _account(memory: bytes | mmap.mmap, rank: int) -> Account:
    _, pid, phase, began_s = _WHO.unpack_from(memory, 0)
    seq, _ = _COUNT.unpack_from(memory, _COUNT_AT)
    waits_in, _ = _WAIT.unpack_from(memory, _WAIT_AT)
    open_, since_s, n_bytes, peer, what = _MESSAGE.unpack_from(memory, _MESSAGE_AT)
    message = Awaited(op=_text(what), peer=peer, n_bytes=n_bytes, start_s=since_s)
    doing = _DOING.unpack_from(memory, _DOING_AT)[1]
    events = []
    for index in range(N_SLOTS):
        number, start_s, end_s, label = _SLOT.unpack_from(memory, _SLOTS_AT + index * _SLOT.size)
        if not number:
            continue
        try:
            op, dtype, n_ranks, dims = _text(label).split("\t")
            event = Event(
                seq=number,
                op=op,
                shape=tuple(int(size) for size in dims.split(",") if size),
                dtype=dtype,
                n_ranks=int(n_ranks),
                start_s=start_s,
                end_s=end_s or None,
            )
        except ValueError:  # it is just being written
            continue
        events.append(event)
    return Account(
        rank=rank,
        pipe=_PIPE.unpack_from(memory, _PIPE_AT)[0],
        pid=pid,
        host=_text(_HOST.unpack_from(memory, _HOST_AT)[0]),
        state=process_state(pid),
        phase=_PHASES[phase],
        began_s=began_s,
        seq=seq,
        waiting=waits_in,
        message=message if open_ else None,
        doing=_text(doing),
        events=tuple(sorted(events, key=lambda event: event.seq)),
    )


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
