"""A player of a sync whose models travel: a worker, a controller, a keeper; each in a process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

from ...algo.compose import DataParallel
from ...algo.effects import Compute, Now, Received, Record, Recv, Send, SumShards
from ...algo.sync.kind import State
from ...algo.sync.peers import Peers
from ...algo.worker import Worker
from .. import own
from ..transport.letters import Kind, Letter
from ..transport.local import HOME, Address, Boxes
from .applied import TAKEN, AppliedList
from .post import Mail, Post
from .server import TOLD, metadata
from .worker import Gradient, Over

_LOOK_S, _UP_S = 0.02, 0.5


class _Again(Exception):
    """The server that this worker has its model from was begun anew."""


@dataclass(kw_only=True)
class Peer:
    """Plays one of them, round after round, until home says that all is over.

    What a round of a server sends leaves at its end, after it was written down where the sync
    `remembers`; elsewhere a snapshot is written every `snapshot_s` seconds, and a server that was
    killed goes on from there: what followed is lost. `folder` has snapshots, and the lists of what
    servers took. Between rounds a player may rest: it begins to compute nothing, and waits for no
    time, but takes what comes.
    """

    sync: Peers
    algorithm: DataParallel
    me: Worker
    state: State
    gradients: Gradient
    buffers: Callable[[], Sequence[torch.Tensor]]
    address: Address
    folder: Path
    life: int
    snapshot_s: float
    compute_s: float = 0.0
    blocked_s: float = 0.0
    told: int = 0
    _asked: int = 0
    _resting: bool = False
    _others_again: bool = False

    def play(self) -> None:
        """Until home says that all is over."""
        self._refused, self._began_s = 0, time.monotonic()
        self._home = Boxes(self.address, self.me.rank, [HOME])
        self._post = Post(self.sync, self.me, self.life, self.address, self._refuse)
        self._list = None if self._is_worker else self._restored()
        self._saved_s = time.monotonic()
        self._send_home(Kind.UP, number=self.told)
        try:
            while True:
                self._play_round()
        except Over:
            if not self._is_worker:
                self._write()
            self._post.close(1.0)
            self._home.close(1.0)

    @property
    def _is_worker(self) -> bool:
        return self.me.rank < self.me.n

    # Rounds -------------------------------------------------------------------------------------

    def _play_round(self) -> None:
        program = self.sync.round(self.algorithm, self.state, self.me)
        self._begun, self._rows = False, list[bytes]()
        try:
            self._go_on(program)
        except _Again:
            program.close()
            self.state = self.sync.outlasted(self.algorithm, self.state)
        if self._rows:
            self._send_home(Kind.TOLD, b"".join(self._rows), number=self.told)
            self.told += 1
        if self._others_again:
            self.state, self._others_again = self.sync.again(self.state), False
        since_s = time.monotonic() - self._saved_s
        if not self._is_worker and (self.sync.remembers or since_s > self.snapshot_s):
            self._write()
        self._post.flush()
        self._did()

    def _go_on(self, program: Any) -> None:
        answer: Any = None
        self._hear(0.0)
        while True:
            try:
                effect = program.send(answer)
            except StopIteration as end:
                self.state = end.value
                return
            answer = None
            if isinstance(effect, Recv):
                answer = self._receive(effect)
                self._begun = True
                continue
            if not self._begun:
                self._rest()
                self._begun = True
            if isinstance(effect, Compute):
                start_s = time.perf_counter()
                answer = self.gradients(effect.params, effect.batch)
                self.compute_s += time.perf_counter() - start_s
            elif isinstance(effect, Send):
                self._post.send(effect.to, effect.message, effect.tag)
                if self._is_worker:
                    self._post.flush()
            elif isinstance(effect, Record):
                self._rows.append(_told(effect))
            elif isinstance(effect, Now):
                answer = time.monotonic() - self._began_s
            else:
                assert isinstance(effect, SumShards), f"{effect} is none of these"
                answer = effect.partial

    def _receive(self, effect: Recv) -> Received | None:
        start_s = time.monotonic()
        up_s = start_s + _UP_S
        while True:
            self._hear(0.0)
            found = self._post.take(effect)
            if found is not None:
                self._note(found[1])
                break
            if self._post.has_of(effect.unless):
                break
            held = self._resting and not self._begun
            left_s = _LOOK_S
            if effect.timeout_s is not None and not held:
                left_s = start_s + effect.timeout_s - time.monotonic()
                if left_s <= 0:
                    self._note(Mail(-1, 0, b""))
                    break
            if not self._begun:
                self._here()
            self._hear(min(left_s, _LOOK_S))
            if time.monotonic() > up_s:
                self._send_home(Kind.UP)
                up_s += _UP_S
        self.blocked_s += time.monotonic() - start_s
        return None if found is None else found[0]

    def _note(self, mail: Mail) -> None:
        if self._list is not None:
            self._list.add(mail.source, mail.life, mail.number)

    def _rest(self) -> None:
        """While home wants it."""
        up_s = time.monotonic() + _UP_S
        while self._resting:
            self._here()
            self._hear(_LOOK_S)
            if time.monotonic() > up_s:
                self._send_home(Kind.UP)
                up_s += _UP_S

    # Letters ------------------------------------------------------------------------------------

    def _hear(self, wait_s: float) -> None:
        """What others say, and what home wants."""
        self._post.hear(wait_s)
        while (letter := self._home.take(0.0)) is not None:
            self._heard(letter)

    def _heard(self, letter: Letter) -> None:
        """What home wants."""
        match letter.kind:
            case Kind.END:
                raise Over
            case Kind.REST:
                self._resting, self._asked = True, letter.covered
            case Kind.GO:
                self._resting, self._asked = False, 0
            case Kind.SEND:
                models = {name: each for name, each in self.state.items() if name != "rule"}
                self._send_home(Kind.HERE, save(own.apart(models)), letter.covered)
            case Kind.LEFT:
                self._post.left(letter.number, letter.covered)
            case Kind.AGAIN if letter.number != self.me.rank:
                if not self._post.again(letter.number, letter.covered) or self.sync.remembers:
                    return
                if not self._is_worker:
                    self._others_again = True
                elif letter.number in self.sync.hear_of(self.me.rank, self.me.n):
                    raise _Again

    def _here(self) -> None:
        """Tell home that it rests, and with which state."""
        if self._asked:
            counts = {name: torch.tensor(n) for name, n in self._post.counts().items()}
            self._send_home(Kind.HERE, save(counts | own.apart(self.state)), self._asked)
            self._asked = 0

    def _did(self) -> None:
        """Tell home how far it is, and what the model keeps."""
        spent = [self.state["step"], self.compute_s, self.blocked_s, self._post.sent_bytes]
        told = {
            "spent": torch.tensor(spent, dtype=torch.float64),
            **{f"buffer/{at}": each.clone() for at, each in enumerate(self.buffers())},
        }
        self._send_home(Kind.DID, save(told))

    def _refuse(self) -> None:
        self._refused += 1
        self._send_home(Kind.HERE, number=-self._refused)

    def _send_home(self, kind: Kind, body: bytes = b"", asked: int = 0, number: int = 0) -> None:
        self._home.send(HOME, Letter(kind, self.me.rank, self.life, number, asked, body))

    # What is written down -----------------------------------------------------------------------

    def _path(self, suffix: str) -> Path:
        return self.folder / f"server-{self.me.rank - self.me.n}{suffix}"

    def _write(self) -> None:
        """A snapshot, with all that a server must know to go on from there."""
        assert self._list is not None, "a server's"
        self._list.flush()
        kept: dict[str, Any] = {"told": self.told, "taken": self._list.n_rows}
        partial = self._path(".partial")
        if self.sync.remembers:
            numbers = {k: v for k, v in self.state.items() if not isinstance(v, torch.Tensor)}
            kept |= {"state": numbers, "post": self._post.written()}
            partial.write_text(json.dumps(kept))
            partial.replace(self._path(".json"))
        else:
            save_file(own.apart(self.state), partial, {"kept": json.dumps(kept)})
            partial.replace(self._path(".safetensors"))
        self._saved_s = time.monotonic()

    def _restored(self) -> AppliedList:
        """Go on from the last snapshot, if an earlier life left one."""
        written = self._path(".json" if self.sync.remembers else ".safetensors")
        kept: Mapping[str, Any] = {"told": 0, "taken": 0}
        if self.life and written.exists() and self.sync.remembers:
            kept = json.loads(written.read_text())
            self.state = self.sync.again({**self.state, **kept["state"]})
            self._post.restore(kept["post"])
            self._post.repeat()
        elif self.life:
            state = self.state
            if written.exists():
                kept = json.loads(metadata(written)["kept"])
                state = own.joined(load_file(written), state)
            self.state = self.sync.restored(state)
        self.told = kept["told"]
        path = self.folder / f"taken-{self.me.rank - self.me.n}.bin"
        return AppliedList(path, kept["taken"], TAKEN)


def _told(record: Record) -> bytes:
    """As a server tells it; with a delay of -1 where there is none."""
    (row,), (worker,), delays = record.seen.rows, record.seen.workers, record.delays or (-1,)
    return TOLD.pack(worker, delays[0], record.step, record.lr, *row)
