"""Plays the program of this replica's worker over a process group, one process a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..algo.compose import DataParallel
from ..algo.effects import (
    ANY,
    Agree,
    Combine,
    Compute,
    Computed,
    Effect,
    Local,
    Members,
    Now,
    Numbers,
    Received,
    Record,
    Recv,
    Seen,
    Send,
    Sleep,
    Sum,
    SumShards,
    Suspect,
    with_suspects,
)
from ..algo.ledger import Ledger
from ..algo.packet import Kinds, Message, from_bytes, to_bytes
from ..algo.topology.passing import refilled, share_of, vector
from ..algo.worker import Worker
from .mesh import World
from .timing import all_gather


class Gradients(Protocol):
    """The gradients of this worker's batches."""

    def __call__(self, params: torch.Tensor, batch: int) -> Computed:
        """The mean gradient of a batch at these parameters."""


@dataclass(kw_only=True)
class Player:
    """One worker of several; all call `round` together.

    `state` is what it has between rounds, `ledger` what it sent. With what workers agree on goes
    what `say` gives, as many numbers on all of them; `heard` is the last that each said.
    `world` is of the workers; `ranks` are their processes (unset: worker and rank are the same);
    messages from one to another go over `post`, a group over host memory (unset: that of `world`).
    Where a worker has several, each plays the program on its part, and `over_replica` sums over
    them what is asked for, or over those that hold parts of the same tensors.
    `compute_s` and `blocked_s` add up the seconds of gradients and of waiting for others.
    """

    algorithm: DataParallel
    me: Worker
    state: dict[str, Any]
    gradients: Gradients
    world: World
    ranks: Sequence[int] = ()
    post: Any = None
    over_replica: Callable[[torch.Tensor, bool], torch.Tensor] | None = None
    on_record: Callable[[Record], None] | None = None
    say: Callable[[], Sequence[float]] = tuple
    ledger: Ledger = field(default_factory=Ledger)
    heard: list[list[float]] = field(default_factory=list)
    compute_s: float = 0.0
    blocked_s: float = 0.0
    _sending: list[tuple[Any, int, torch.Tensor]] = field(default_factory=list)
    _suspects: tuple[int, ...] = ()
    _began_s: float = field(default_factory=time.monotonic)

    def round(self) -> None:
        """One round of the program."""
        program = self.algorithm.sync.round(self.algorithm, self.state, self.me)
        answer: Any = None
        while True:
            try:
                effect = program.send(answer)
            except StopIteration as end:
                self.state = end.value
                break
            answer = self._carry_out(effect)
        for work, to, data in self._sending:  # buffers live until they are sent
            with self.world.record.message("send", to, data.nbytes), self._blocked():
                work.wait()
        self._sending.clear()

    def _carry_out(self, effect: Effect) -> Any:
        match effect:
            case Compute():
                return self._timed(partial(self.gradients, effect.params, effect.batch))
            case Local():
                return self._timed(effect.work)
            case SumShards():
                if self.over_replica is None:
                    return effect.partial
                return self.over_replica(effect.partial, effect.per_tensor)
            case Agree():
                return self._agree(effect)
            case Combine():
                return effect.function(self._gather(effect.message))
            case Sum():
                return self._sum(effect.message)
            case Send():
                return self._send(effect)
            case Recv():
                return self._receive(effect)
            case Record():
                effect, self._suspects = with_suspects(effect, self._suspects), ()
                return self.on_record(effect) if self.on_record is not None else None
            case Suspect():
                self._suspects += effect.workers
            case Now():
                return time.monotonic() - self._began_s
            case Members():
                return tuple(range(self.me.n))
            case Sleep():
                time.sleep(effect.seconds)
        return None

    def _timed(self, work: Callable[[], Any]) -> Any:
        start_s = time.perf_counter()
        found = work()
        self.compute_s += time.perf_counter() - start_s
        return found

    def _agree(self, effect: Agree) -> tuple[Seen, ...]:
        own = torch.tensor(effect.batches, dtype=torch.float64)
        said = torch.tensor(self.say(), dtype=torch.float64)
        told = self._all(torch.cat([own.reshape(-1), said]), "agree").view(self.me.n, -1)
        self.heard = told[:, own.numel() :].tolist()
        self.ledger.gathered([own.numel() * own.element_size()] * self.me.n, of=self.me.rank)
        rows = told[:, : own.numel()].view(self.me.n, *own.shape).tolist()
        return Seen.of([[Numbers(*batch) for batch in batches] for batches in rows])

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.blocked_s += time.perf_counter() - start_s

    def _gather(self, message: Message) -> list[Message]:
        """What each worker gives, by rank."""
        data = to_bytes(message)
        sizes = [data.numel()] * self.me.n
        if _varies(message.kinds):
            sizes = self._all(torch.tensor([data.numel()]), "sizes").tolist()
        padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
        rows = self._all(padded, "combine").view(self.me.n, -1)
        self.ledger.gathered(sizes, of=self.me.rank)
        return [
            from_bytes(row[:size], message.kinds) for row, size in zip(rows, sizes, strict=True)
        ]

    def _sum(self, message: Message) -> Message:
        """The sum over workers: each sums its share of the entries, in order of workers."""
        summed = [self._summed(part) for part in vector(message)]
        return refilled(message, tuple(summed))

    def _summed(self, own: torch.Tensor) -> torch.Tensor:
        n, group = self.me.n, self.world.group
        share = share_of(own.numel(), n)
        self.ledger.summed(share * own.element_size(), n, of=self.me.rank)
        if group is None:
            return own
        given = torch.nn.functional.pad(own, (0, n * share - own.numel())).to(self.world.device)
        rows, whole = torch.empty_like(given), torch.empty_like(given)
        with self.world.record.inside("all_to_all sum", given, n, settles=False), self._blocked():
            dist.all_to_all_single(rows, given, group=group)
        first, *others = rows.view(n, share)
        total = sum(others, first)
        with self.world.record.inside("all_gather sum", total, n, settles=False), self._blocked():
            all_gather(whole, total.contiguous(), group=group)
        return whole[: own.numel()].to(own.device)

    def _all(self, own: torch.Tensor, what: str) -> torch.Tensor:
        """The tensors of all workers, one after another, where this worker's is."""
        if self.world.group is None:
            return own
        home, own = own.device, own.to(self.world.device)
        rows = own.new_empty(self.me.n * own.numel())
        with self.world.record.inside(f"all_gather {what}", own, self.me.n), self._blocked():
            all_gather(rows, own, group=self.world.group)
            return rows.to(home)

    def _send(self, effect: Send) -> None:
        data = to_bytes(effect.message)
        self.ledger.sent(self.me.rank, effect.to, data.numel())
        parts = [data]
        if _varies(effect.message.kinds):
            parts.insert(0, torch.tensor([data.numel()]))
        for part in parts:
            if part.numel():
                moved = part.to(self._post_device)
                to = self.ranks[effect.to] if self.ranks else effect.to
                work = dist.isend(moved, to, group=self._post)
                self._sending.append((work, to, moved))

    def _receive(self, effect: Recv) -> Received:
        assert effect.source != ANY, "a group does not receive from whoever comes first"
        assert effect.timeout_s is None, "a group waits as long as the run's own limit"
        size = torch.tensor([_size(effect.kinds)])
        if _varies(effect.kinds):
            size = self._take(size, effect.source)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.state["params"].device)
        data = self._take(data, effect.source)
        return Received(source=effect.source, message=from_bytes(data, effect.kinds))

    @property
    def _post(self) -> Any:
        return self.world.group if self.post is None else self.post

    @property
    def _post_device(self) -> torch.device:
        return self.world.device if self.post is None else torch.device("cpu")

    def _take(self, into: torch.Tensor, source: int) -> torch.Tensor:
        home = into.device
        if into.numel():
            into = into.to(self._post_device)
            source = self.ranks[source] if self.ranks else source
            with self.world.record.message("recv", source, into.nbytes), self._blocked():
                dist.recv(into, source, group=self._post)
                into = into.to(home)
        return into


def _varies(kinds: Kinds) -> bool:
    """Whether the size of such a message is not known before."""
    return any(form.length is None for kind, like in kinds for form in kind.form(like))


def _size(kinds: Kinds) -> int:
    forms: Sequence[Any] = [form for kind, like in kinds for form in kind.form(like)]
    return sum((f.length or 0) * getattr(torch, f.dtype).itemsize for f in forms)
