"""Plays syncs with servers in any order that messages may come in: for their tests."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
)
from polyreme.algo.packet import Message, from_bytes, to_bytes
from polyreme.algo.vector import Layout
from served import Gradient, team

if TYPE_CHECKING:
    import torch


class Scattered:
    """Players on machines of any speed: what comes next is drawn, only links keep their order.

    A move is a gradient that is ready, a message that comes, or a wait that ends. Each worker
    computes `batches` gradients. `after` is called after each move.
    """

    def __init__(
        self,
        algorithm: DataParallel,
        gradient: Gradient,
        starts: Sequence[torch.Tensor],
        *,
        seed: int,
        batches: int,
        lr: float = 0.1,
        after: Callable[[Scattered], None] = lambda _: None,
    ) -> None:
        self.algorithm, self.gradient, self.after = algorithm, gradient, after
        self.n, self.batches, self.drawn = len(starts), batches, random.Random(seed)
        self.team = team(algorithm, Layout.of({"w": tuple(starts[0].shape)}), self.n, lr=lr)
        self.states = [
            algorithm.sync.init(algorithm, starts[me.rank % self.n].clone(), me) for me in self.team
        ]
        self.links: defaultdict[tuple[int, int], deque[Message]] = defaultdict(deque)
        self.here: list[deque[Received]] = [deque() for _ in self.team]
        self.programs: list[Any] = [None] * len(self.team)
        self.wants: list[Any] = [None] * len(self.team)
        self.records: list[Record] = []
        self.n_moves = 0

    @property
    def servers(self) -> list[dict[str, Any]]:
        """Their states."""
        return self.states[self.n :]

    @property
    def under_way(self) -> list[tuple[int, int, Message]]:
        """Source, receiver and message of all that was sent and not read."""
        found = [(a, b, message) for (a, b), each in self.links.items() for message in each]
        return found + [
            (r.source, to, r.message) for to, each in enumerate(self.here) for r in each
        ]

    def run(self) -> Scattered:
        """Until all gradients are computed and nothing is under way."""
        for rank in range(len(self.team)):
            self._begin(rank)
        while moves := self._moves():
            what, at = self.drawn.choice(moves)
            self.n_moves += 1
            if what == "comes":
                source, to = at
                message = self.links[at].popleft()
                self.here[to].append(Received(source=source, message=message))
                self._go_on(to)
            elif what == "computed":
                effect = self.wants[at]
                found = self.gradient(at, effect.batch, effect.params)
                self._go_on(at, Computed(gradient=found, loss=0.0, weight=1.0, n_samples=1))
            else:
                self._go_on(at, None, over=True)
            self.after(self)
        return self

    def _moves(self) -> list[tuple[str, Any]]:
        moves: list[tuple[str, Any]] = [("comes", at) for at, each in self.links.items() if each]
        for rank, effect in enumerate(self.wants):
            if isinstance(effect, Compute) and effect.batch < self.batches:
                moves.append(("computed", rank))
            if isinstance(effect, Recv) and effect.timeout_s is not None:
                moves.append(("over", rank))
        return moves

    def _begin(self, rank: int) -> None:
        sync = self.algorithm.sync
        self.programs[rank] = sync.round(self.algorithm, self.states[rank], self.team[rank])
        self._play(rank, None)

    def _go_on(self, rank: int, answer: Any = None, *, over: bool = False) -> None:
        effect = self.wants[rank]
        if isinstance(effect, Recv) and not over:
            answer = self._taken(rank, effect)
            if answer is None:
                return
        self._play(rank, answer)

    def _play(self, rank: int, answer: Any) -> None:
        while True:
            try:
                effect = self.programs[rank].send(answer)
            except StopIteration as end:
                self.states[rank] = end.value
                self._begin(rank)
                return
            answer, self.wants[rank] = None, effect
            match effect:
                case Send():
                    sent = from_bytes(to_bytes(effect.message), effect.message.kinds)
                    self.links[rank, effect.to].append(sent)
                case Record():
                    self.records.append(effect)
                case SumShards():
                    answer = effect.partial
                case Now():
                    answer = 0.01 * self.n_moves
                case Recv():
                    answer = self._taken(rank, effect)
                    if answer is None:
                        return
                case Compute():
                    return
                case _:
                    raise AssertionError(f"{effect} is of workers that meet")

    def _taken(self, rank: int, effect: Recv) -> Received | None:
        for at, received in enumerate(self.here[rank]):
            if effect.source in (ANY, received.source):
                del self.here[rank][at]
                assert received.message.kinds == effect.kinds
                return received
        return None
