"""Plays served syncs push by push, in any order of arrival, without a clock: for their tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import (
    ANY,
    Compute,
    Computed,
    Now,
    Received,
    Record,
    Recv,
    Send,
    SumShards,
    Suspect,
    with_suspects,
)
from polyreme.algo.packet import from_bytes, to_bytes
from polyreme.algo.push import LEFT
from polyreme.algo.vector import Layout
from polyreme.sim.driver import Simulation
from workers import workers

Gradient = Callable[[int, int, torch.Tensor], torch.Tensor]


class Post:
    """Workers and servers whose messages travel as bytes; nobody waits for a clock.

    A worker computes when it has parameters; `arrive` delivers what it computed, or that it came.
    It is `now_s` until someone sets it.
    """

    def __init__(
        self,
        algorithm: DataParallel,
        gradient: Gradient,
        start: torch.Tensor,
        n: int,
        *,
        lr: float | Callable[[int], float] = 0.1,
        weight: Callable[[int, int], float] = lambda _rank, _batch: 1.0,
    ) -> None:
        self.algorithm, self.gradient, self.weight, self.n = algorithm, gradient, weight, n
        self.team = team(algorithm, Layout.of({"w": tuple(start.shape)}), n, lr=lr)
        self.states = [algorithm.sync.init(algorithm, start.clone(), me) for me in self.team]
        self.mail: list[deque[tuple[int, torch.Tensor]]] = [deque() for _ in self.team]
        self.records: list[Record] = []
        self.nbytes = [0] * len(self.team)
        self.now_s = 0.0
        self._suspects: tuple[int, ...] = ()
        self._held: dict[int, list[tuple[int, int, torch.Tensor]]] = {}
        self.gone: set[int] = set()
        for rank in range(n):
            self._compute(rank)

    @property
    def params(self) -> torch.Tensor:
        """The model at the servers."""
        return self.algorithm.sync.whole(self.states[self.n :], self.states[: self.n])

    @property
    def server(self) -> dict[str, Any]:
        """The first server's state."""
        return self.states[self.n]

    def can(self) -> list[int]:
        """Workers that have something to push."""
        return sorted(self._held)

    def arrive(self, worker: int) -> None:
        """Deliver what a worker computed, and all that follows but other pushes."""
        for source, to, data in self._held.pop(worker):
            self.mail[to].append((source, data))
        self._go_on()

    def leave(self, worker: int) -> None:
        """A worker is gone, with what it computed and what was sent to it; servers are told."""
        self._held.pop(worker, None)
        self.gone.add(worker)
        form = self.algorithm.sync.form(self.algorithm)
        for at, to in enumerate(range(self.n, len(self.team))):
            message = form.notice(LEFT, self.states[worker]["params"], at, self.team[worker])
            self.mail[to].append((worker, to_bytes(message)))
        self._go_on()

    def come(self, worker: int) -> None:
        """One that was gone has something to push again: that it is there."""
        self.gone.discard(worker)
        self.states[worker] = self.algorithm.sync.anew(self.algorithm, self.states[worker])
        self._compute(worker)

    def _go_on(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(self.n, len(self.team)):
                while self.mail[rank]:
                    self._round(rank)
                    moved = True
            for rank in range(self.n):
                if rank in self.gone:
                    self.mail[rank].clear()
                    continue
                while self.mail[rank]:
                    self._round(rank)
                    moved = True
                if rank not in self._held and not any(self.states[rank]["awaits"].values()):
                    self._compute(rank)

    def order(self, workers: Sequence[int]) -> Post:
        """Deliver in this order."""
        for worker in workers:
            self.arrive(worker)
        return self

    def _compute(self, worker: int) -> None:
        sent: list[tuple[int, int, torch.Tensor]] = []
        self._round(worker, sent)
        self._held[worker] = sent

    def _round(self, rank: int, held: list[tuple[int, int, torch.Tensor]] | None = None) -> None:
        program = self.algorithm.sync.round(self.algorithm, self.states[rank], self.team[rank])
        answer: Any = None
        while True:
            try:
                effect = program.send(answer)
            except StopIteration as end:
                self.states[rank] = end.value
                return
            answer = None
            match effect:
                case Compute():
                    found = self.gradient(rank, effect.batch, effect.params)
                    weight = self.weight(rank, effect.batch)
                    answer = Computed(gradient=found, loss=0.0, weight=weight, n_samples=1)
                case Send():
                    data = to_bytes(effect.message)
                    assert data.numel() == effect.message.nbytes
                    self.nbytes[rank] += data.numel()
                    if held is None:
                        self.mail[effect.to].append((rank, data))
                    else:
                        held.append((rank, effect.to, data))
                case Recv():
                    answer = self._taken(rank, effect)
                case Record():
                    self.records.append(with_suspects(effect, self._suspects))
                    self._suspects = ()
                case Suspect():
                    self._suspects += effect.workers
                case SumShards():
                    answer = effect.partial
                case Now():
                    answer = self.now_s
                case _:
                    raise AssertionError(f"{effect} is of workers that meet")

    def _taken(self, rank: int, effect: Recv) -> Received:
        for at, (source, data) in enumerate(self.mail[rank]):
            if effect.source in (ANY, source):
                del self.mail[rank][at]
                return Received(source=source, message=from_bytes(data, effect.kinds))
        raise AssertionError(f"player {rank} waits for {effect.source}, who sent nothing")


def team(
    algorithm: DataParallel, layout: Layout, n: int, *, lr: float | Callable[[int], float] = 0.1
) -> list[Any]:
    """Workers and the servers that follow them."""
    (first,) = workers(1, layout, lr=lr)
    n_players = n + algorithm.sync.n_servers(n)
    return [replace(first, rank=rank, n=n) for rank in range(n_players)]


def simulated(
    algorithm: DataParallel,
    gradient: Gradient,
    start: torch.Tensor,
    n: int,
    *,
    lr: float | Callable[[int], float] = 0.1,
    states: Sequence[dict[str, Any]] | None = None,
    **more: Any,
) -> Simulation:
    """The same on the virtual clock."""
    players = team(algorithm, Layout.of({"w": tuple(start.shape)}), n, lr=lr)
    given = states or [algorithm.sync.init(algorithm, start.clone(), me) for me in players]
    return Simulation(
        algorithm,
        players,
        given,
        lambda rank, params, batch: Computed(
            gradient=gradient(rank, batch, params), loss=0.0, weight=1.0, n_samples=1
        ),
        **more,
    )
