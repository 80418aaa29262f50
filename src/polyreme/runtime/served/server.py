"""A server: plays its part of the algorithm, push by push, and keeps snapshots of itself."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from ...algo.answer import Answers
from ...algo.compose import DataParallel
from ...algo.effects import Now, Numbers, Received, Record, Recv, Send, SumShards, Suspect
from ...algo.packet import Message, from_bytes, to_bytes
from ...algo.push import HELLO, LEFT
from ...algo.sync.kind import State
from ...algo.sync.served import Served
from ...algo.worker import Worker
from .. import own
from ..transport.letters import Kind, Letter
from ..transport.local import HOME, Address, Boxes, Office
from .applied import AppliedList
from .journal import Journal

_LEAST_BYTES, _TIMES = 1 << 26, 4
"""A snapshot is taken once more is written than this, or than so many times the last snapshot."""

_PATIENCE_S = 1.0
_TURN_S = 1.0  # a longer turn is one in which it was stopped, and its clock with it

TOLD = struct.Struct("<iqqd4d")
"""Of a batch: worker, delay, step, rate, and its `Numbers`; of a suspect its worker, at a step of
`SUSPECT`."""
SUSPECT = -1


@dataclass(kw_only=True)
class Known:
    """Of one worker: how often it was begun, and its last push that came.

    `sent` is the last answer to it where answers are packed: another would not follow on it.
    Pushes after `missed` were asked for at `asked_s`.
    """

    life: int = 0
    last: int = -1
    sent: Letter | None = None
    missed: int = -2
    asked_s: float = 0.0


@dataclass(kw_only=True)
class Server:
    """One server of a run, on letters from workers and home.

    Every push is applied once: those that came before are answered again, later ones that skip some
    are asked for anew. A push is written down before it is dealt with; every `snapshot_s` seconds,
    or when much is written, a snapshot takes the place of that. One that was killed deals again
    with what followed its snapshot, in the same order. Pushes are counted anew in each life of a
    worker. Its clock counts the seconds that it was there for, in all its lives; what is written
    down of a letter has the time, in microseconds, in `covered`, so that it is dealt with again at
    the time at which it was.
    """

    sync: Served
    algorithm: DataParallel
    me: Worker
    state: State
    address: Address
    folder: Path
    life: int
    snapshot_s: float
    known: dict[int, Known] = field(default_factory=dict)
    told: int = 0
    _wanted: Letter | None = None
    _list: AppliedList = field(init=False)
    _journal: Journal = field(init=False)
    _n_journals: int = field(init=False, default=0)
    _most: int = field(init=False, default=_LEAST_BYTES)
    _again: bool = field(init=False, default=False)  # what was dealt with is dealt with again
    _now_s: float = field(init=False, default=0.0)
    _at_us: int = field(init=False, default=0)  # when what is dealt with came

    def play(self) -> None:
        """Until home says that all is over."""
        self._home = Boxes(self.address, self.me.rank, [HOME])
        self._home.send(HOME, Letter(Kind.UP, self.me.rank, self.life))
        self._restore()
        self._refused = 0
        self._saved_s = turned_s = time.monotonic()
        with Office(self.address, self.me.rank, self._refuse) as self._office:
            while True:
                letter = self._office.take(0.05)
                before_s, turned_s = turned_s, time.monotonic()
                self._now_s += min(turned_s - before_s, _TURN_S)
                if letter is not None:
                    self._took(letter)
                asked = self._home.take(0.0)
                if asked is not None:
                    if asked.kind is Kind.END:
                        break
                    self._asked(asked)
                late = time.monotonic() - self._saved_s > self.snapshot_s
                if late or self._journal.nbytes > self._most:
                    self._snapshot()
            self._snapshot()
        self._journal.end()
        self._home.close(linger_s=1.0)

    def _refuse(self) -> None:
        self._refused += 1
        self._home.send(HOME, Letter(Kind.HERE, self.me.rank, self.life, -self._refused))

    # Letters ------------------------------------------------------------------------------------

    def _took(self, letter: Letter) -> None:
        worker = letter.source
        if not 0 <= worker < self.me.n:
            return
        known = self._begun(worker, letter.life)
        if letter.life < known.life:
            return  # of one that is gone
        match letter.kind:
            case Kind.PUSH:
                self._push(letter, known)
            case Kind.HELLO:
                self._hear(letter)
            case Kind.ASK:
                self._ask(letter.number, worker, known)
        self._give()

    def _begun(self, worker: int, life: int) -> Known:
        """What is known of a worker, that was begun so often."""
        known = self.known.setdefault(worker, Known())
        if life > known.life:
            known.life, known.last, known.sent = life, -1, None
        return known

    def _push(self, letter: Letter, known: Known) -> None:
        if letter.number > known.last + 1:
            self._miss(letter.source, known)
        elif letter.number == known.last:
            self._ask(letter.number, letter.source, known)
        elif letter.number > known.last:
            known.last = letter.number
            self._deal(self._written(letter))

    def _miss(self, worker: int, known: Known) -> None:
        """Some are missing: asked for once, and again where none of them comes for a while."""
        now_s = time.monotonic()
        if known.missed != known.last or now_s - known.asked_s > _PATIENCE_S:
            known.missed, known.asked_s = known.last, now_s
            self._have(worker, known)

    def _hear(self, letter: Letter) -> None:
        """That a worker came, or is gone."""
        self._notice(self._written(letter))

    def _written(self, letter: Letter) -> Letter:
        """What is written down of a letter that is dealt with now."""
        self._at_us = round(self._now_s * 1e6)
        letter = letter._replace(covered=self._at_us)
        self._journal.add(letter)
        return letter

    def _notice(self, letter: Letter) -> None:
        number = HELLO if letter.kind is Kind.HELLO else LEFT
        message = self.form.notice(number, self.state["params"], self._number, self.me)
        self._play(message, letter.source)

    def _deal(self, letter: Letter) -> None:
        """A push that is the next of its worker."""
        message = from_bytes(_tensor(letter.body, self.state), self._kinds)
        version = int(message.packets[0].decode()[1])
        self._play(message, letter.source)
        self._list.add(letter.source, letter.life, letter.number, version)

    def _ask(self, number: int, worker: int, known: Known) -> None:
        """Where is the answer to that push?"""
        if known.last < number:
            self._have(worker, known)
        elif "waits" in self.state and not self.state["present"][str(worker)]:
            # It was taken for gone while it waited.
            self._hear(Letter(Kind.HELLO, worker, known.life))
        elif self.sync.owes(self.state, worker):
            return
        elif known.sent is not None:
            self._office.send(worker, known.sent)
        else:
            message, self.state = self.sync.reply(self.algorithm, self.state, worker, self.me)
            self._answer(worker, message)

    def _have(self, worker: int, known: Known) -> None:
        letter = Letter(Kind.HAVE, self.me.rank, self.life, known.last, known.last)
        self._office.send(worker, letter)

    def _answer(self, worker: int, message: Message) -> None:
        known = self.known.setdefault(worker, Known())
        body = to_bytes(message).cpu().numpy().data
        letter = Letter(Kind.ANSWER, self.me.rank, self.life, known.last, known.last, body)
        if self._answers.packs:
            known.sent = letter
        if not self._again:
            self._office.send(worker, letter)

    def _asked(self, letter: Letter) -> None:
        """What home wants."""
        if letter.kind is Kind.LEFT:
            self._left(letter.number, letter.covered)
        elif letter.kind is Kind.SEND:
            self._wanted = letter
            for worker in self._give():  # who rests, and does not ask
                self._have(worker, self.known[worker])

    def _left(self, worker: int, life: int) -> None:
        """A worker is gone, unless a later life of it has come already."""
        if self._begun(worker, life).life == life:
            self._hear(Letter(Kind.LEFT, worker, life))

    def _whole(self) -> State:
        """What it keeps, now."""
        return self.state

    def _give(self) -> list[int]:
        """What home wants, once the pushes have come that it knows to be under way.

        Gives the workers whose pushes have not.
        """
        letter = self._wanted
        if letter is None:
            return []
        lasts: list[list[int]] = json.loads(bytes(letter.body) or b"[]")
        behind = []
        for worker, life, last in lasts:
            known = self._begun(worker, life)
            if known.life == life and known.last < last:
                behind.append(worker)
        if behind:
            return behind
        self._wanted = None
        state = self._whole()
        whole = own.apart(state) if letter.number else {"params": state["params"]}
        answer = Letter(
            Kind.HERE, self.me.rank, self.life, letter.number, letter.covered, save(whole)
        )
        self._home.send(HOME, answer)
        return []

    # Rounds -------------------------------------------------------------------------------------

    @property
    def form(self) -> Any:
        """How pushes travel."""
        return self.sync.form(self.algorithm)

    @property
    def _answers(self) -> Answers:
        return self.sync.answers(self.algorithm)

    @property
    def _number(self) -> int:
        return self.me.rank - self.me.n

    @property
    def _kinds(self) -> Any:
        return self.form.kinds(self.me, str(self.state["params"].dtype).removeprefix("torch."))

    def _play(self, message: Message, source: int) -> None:
        """One round, that takes this message."""
        program = self.sync.round(self.algorithm, self.state, self.me)
        answer: Any = None
        rows: list[bytes] = []
        while True:
            try:
                effect = program.send(answer)
            except StopIteration as end:
                self.state = end.value
                break
            answer = None
            if isinstance(effect, Recv):
                answer = Received(source=source, message=message)
            elif isinstance(effect, Send):
                self._answer(effect.to, effect.message)
            elif isinstance(effect, Record):
                rows.append(_told(effect))
            elif isinstance(effect, Suspect):
                rows += [TOLD.pack(w, 0, SUSPECT, 0.0, *Numbers()) for w in effect.workers]
            elif isinstance(effect, Now):
                answer = self._at_us / 1e6
            else:
                assert isinstance(effect, SumShards), f"{effect} is none of a server"
                answer = effect.partial
        if rows:
            self._tell(b"".join(rows))

    def _tell(self, rows: bytes) -> None:
        """Tell home what came of a push."""
        self._home.send(HOME, Letter(Kind.TOLD, self.me.rank, self.life, self.told, 0, rows))
        self.told += 1

    # Snapshots ----------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        self._list.flush()
        path = self.folder / f"server-{self._number}.safetensors"
        partial, journal = path.with_suffix(".partial"), self._open(self._n_journals + 1, new=True)
        kept = {
            "known": {w: (k.life, k.last) for w, k in self.known.items()},
            "told": self.told,
            "applied": self._list.n_rows,
            "journal": self._n_journals + 1,
            "now_s": self._now_s,
        }
        save_file(own.apart(self._whole()), partial, {"kept": json.dumps(kept)})
        partial.replace(path)
        self._journal.end()
        self._journal, self._n_journals = journal, self._n_journals + 1
        self._most = max(_LEAST_BYTES, _TIMES * path.stat().st_size)
        self._saved_s = time.monotonic()

    def _open(self, number: int, *, new: bool) -> Journal:
        return Journal(self.folder / f"journal-{self._number}-{number}.bin", new=new)

    def _restore(self) -> None:
        """Go on from the last snapshot and what was written since, if an earlier life left them."""
        path, n_applied = self.folder / f"server-{self._number}.safetensors", 0
        if self.life and path.exists():
            self.state = own.joined(load_file(path), self.state)
            kept: Mapping[str, Any] = json.loads(metadata(path)["kept"])
            self.known = {
                int(worker): Known(life=life, last=last)
                for worker, (life, last) in kept["known"].items()
            }
            self.told, n_applied = kept["told"], kept["applied"]
            self._n_journals, self._now_s = kept["journal"], kept["now_s"]
        self._list = AppliedList(self.folder / f"applied-{self._number}.bin", n_applied)
        self._journal = self._open(self._n_journals, new=not self.life)
        self._again = True
        for letter in self._journal.letters():
            known = self._begun(letter.source, letter.life)
            self._at_us, self._now_s = letter.covered, letter.covered / 1e6
            if letter.kind is Kind.PUSH:
                known.last = letter.number
                self._deal(letter)
            else:
                self._notice(letter)
        self._again = False
        if self.life:
            self.state = self._answers.forgotten(self.state, self.life)
            for known in self.known.values():
                known.sent = None


def _told(record: Record) -> bytes:
    (row,), (worker,), (delay,) = record.seen.rows, record.seen.workers, record.delays
    return TOLD.pack(worker, delay, record.step, record.lr, *row)


def _tensor(body: bytes | memoryview, state: State) -> torch.Tensor:
    """A letter's bytes, where a state lies."""
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).to(state["params"].device)


def metadata(path: Path) -> dict[str, str]:
    """What a safetensors file says beside its tensors."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return dict(file.metadata())
