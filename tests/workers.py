"""Plays the programs of all workers in this process, without a clock: for tests of algorithms."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import (
    ANY,
    Agree,
    Combine,
    Compute,
    Computed,
    Effect,
    Local,
    Members,
    Now,
    Program,
    Received,
    Record,
    Recv,
    Seen,
    Send,
    Sleep,
    Sum,
    SumShards,
    Suspect,
)
from polyreme.algo.packet import Message, from_bytes, to_bytes, total
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker

Gradient = Callable[[int, int, torch.Tensor], torch.Tensor]
"""Of a worker, its batch (counted from 0) and parameters."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """What rounds came to: each worker's states before the first and after each, bytes given."""

    states: list[list[dict[str, Any]]]
    nbytes: list[int]
    records: list[Record] = field(default_factory=list)

    @property
    def params(self) -> torch.Tensor:
        """By round (the start is the first) and worker."""
        return torch.stack([torch.stack([s["params"] for s in each]) for each in self.states])


def workers(
    n: int,
    layout: Layout,
    *,
    lr: float | Callable[[int], float] = 0.1,
    seed: int = 0,
    samples: Sequence[int] = (),
    n_steps: int | None = None,
) -> list[Worker]:
    """All workers of a run; `samples` are how many each owns."""
    rate = lr if callable(lr) else lambda _step: lr
    return [
        Worker(
            rank=rank,
            n=n,
            layout=layout,
            seed=seed,
            lr=rate,
            n_samples=samples[rank] if samples else 0,
            n_steps=n_steps,
        )
        for rank in range(n)
    ]


def play(
    algorithm: DataParallel,
    gradient: Gradient,
    start: torch.Tensor,
    n: int,
    rounds: int,
    *,
    lr: float | Callable[[int], float] = 0.1,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    states: Sequence[dict[str, Any]] | None = None,
    weight: Callable[[int, int], float] = lambda _rank, _batch: 1.0,
    loss: Callable[[int, int], float] = lambda _rank, _batch: 0.0,
    samples: Sequence[int] = (),
    batch_samples: int = 0,
    n_steps: int | None = None,
) -> Played:
    """Rounds of an algorithm from `start`, or from the states of an earlier play."""
    layout = Layout.of(shapes or {"w": tuple(start.shape)})
    team = workers(n, layout, lr=lr, seed=seed, samples=samples, n_steps=n_steps)
    now = list(states or (algorithm.sync.init(algorithm, start.clone(), me) for me in team))
    world = World(n=n, gradient=gradient, weight=weight, loss=loss, batch_samples=batch_samples)
    seen = [now]
    for _ in range(rounds):
        programs = [algorithm.sync.round(algorithm, s, me) for s, me in zip(now, team, strict=True)]
        now = world.run(programs)
        seen.append(now)
    return Played(states=seen, nbytes=world.nbytes, records=world.records)


class World:
    """Answers effects: worker after worker, each as far as it gets; messages travel as bytes."""

    def __init__(
        self,
        *,
        n: int,
        gradient: Gradient | None = None,
        weight: Callable[[int, int], float] = lambda _rank, _batch: 1.0,
        loss: Callable[[int, int], float] = lambda _rank, _batch: 0.0,
        batch_samples: int = 0,
    ) -> None:
        self.n, self.gradient, self.weight = n, gradient, weight
        self.loss, self.batch_samples = loss, batch_samples
        self.mail: list[deque[tuple[int, torch.Tensor]]] = [deque() for _ in range(n)]
        self.nbytes = [0] * n
        self.records: list[Record] = []

    def run(self, programs: Sequence[Program[Any]]) -> list[Any]:
        """What each program returns."""
        results: list[Any] = [None] * self.n
        asked: dict[int, Effect] = {}
        alive = set(range(self.n))

        def go(rank: int, answer: Any) -> None:
            try:
                asked[rank] = programs[rank].send(answer)
            except StopIteration as end:
                results[rank] = end.value
                alive.discard(rank)
                asked.pop(rank, None)

        for rank in range(self.n):
            go(rank, None)
        while alive:
            moved = False
            for rank in sorted(alive):
                while rank in alive and (answer := self._alone(rank, asked[rank])) is not _WAITS:
                    go(rank, answer)
                    moved = True
            if not moved and len(alive) == self.n:
                answers = self._all([asked[rank] for rank in range(self.n)])
                for rank, answer in enumerate(answers):
                    go(rank, answer)
                moved = True
            assert moved, f"workers wait for each other: {asked}"
        assert not any(self.mail), "every message is received"
        return results

    def _alone(self, rank: int, effect: Effect) -> Any:
        """The answer, if it needs nobody else, or what it needs has come."""
        match effect:
            case Compute():
                assert self.gradient is not None
                gradient = self.gradient(rank, effect.batch, effect.params)
                return Computed(
                    gradient=gradient,
                    loss=self.loss(rank, effect.batch),
                    weight=self.weight(rank, effect.batch),
                    n_samples=self.batch_samples,
                )
            case Local():
                return effect.work()
            case Record():
                self.records.append(effect)
                return None
            case Send():
                self.mail[effect.to].append((rank, self._sent(rank, effect.message)))
                return None
            case Recv():
                for at, (source, data) in enumerate(self.mail[rank]):
                    if effect.source in (ANY, source):
                        del self.mail[rank][at]
                        return Received(source=source, message=from_bytes(data, effect.kinds))
                return _WAITS
            case SumShards():
                return effect.partial
            case Suspect():
                return None
            case Now():
                return 0.0
            case Sleep():
                return None
            case Members():
                return tuple(range(self.n))
        return _WAITS

    def _all(self, effects: Sequence[Effect]) -> list[Any]:
        """The answers to an effect that all workers have at once."""
        if all(isinstance(effect, Agree) for effect in effects):
            return [Seen.of([effect.batches for effect in effects])] * self.n
        assert len({type(effect) for effect in effects}) == 1, f"cannot go on: {effects}"
        assert isinstance(effects[0], Combine | Sum), f"cannot go on: {effects}"
        messages = [
            from_bytes(self._sent(rank, effect.message), effect.message.kinds)
            for rank, effect in enumerate(effects)
        ]
        if isinstance(effects[0], Sum):
            return [total(messages)] * self.n
        return [effects[0].function(messages)] * self.n

    def _sent(self, rank: int, message: Message) -> torch.Tensor:
        data = to_bytes(message)
        assert data.numel() == message.nbytes, "bytes on the wire are those that are stated"
        self.nbytes[rank] += data.numel()
        return data


_WAITS = object()
