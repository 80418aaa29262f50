"""Plays syncs with servers in any order that messages may come in: for their tests."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import (
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


class Sent(NamedTuple):
    """A message under way, what it belongs to, and which life of a worker it is of or for."""

    message: Message
    tag: int = 0
    life: int = 0


class Scattered:
    """Players on machines of any speed: what comes next is drawn, only links keep their order.

    A move is a gradient that is ready, a message that comes, or a wait that ends. Each worker
    computes `batches` gradients. `after` is called after each move. With `crashes` a move may be
    that a worker crashes, at any time, or is back; all are back at the end. What it had sent still
    arrives, then the news; what was meant for an earlier life of it does not.
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
        crashes: int = 0,
    ) -> None:
        self.algorithm, self.gradient, self.after = algorithm, gradient, after
        self.n, self.batches, self.drawn = len(starts), batches, random.Random(seed)
        self.team = team(algorithm, Layout.of({"w": tuple(starts[0].shape)}), self.n, lr=lr)
        self.states = [
            algorithm.sync.init(algorithm, starts[me.rank % self.n].clone(), me) for me in self.team
        ]
        self.links: defaultdict[tuple[int, int], deque[Sent]] = defaultdict(deque)
        self.here: list[deque[tuple[Received, Sent]]] = [deque() for _ in self.team]
        self.life, self.heard = [0] * self.n, dict[tuple[int, int], int]()
        self.gone: set[int] = set()
        self.crashes, self.come_back = crashes, True
        self.log: list[tuple[int, int, Message]] = []
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
        found = [(a, b, sent.message) for (a, b), each in self.links.items() for sent in each]
        return found + [
            (r.source, to, r.message) for to, each in enumerate(self.here) for r, _ in each
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
                sent = self.links[at].popleft()
                if to >= self.n or (to not in self.gone and sent.life == self.life[to]):
                    received = Received(source=source, message=sent.message)
                    self.here[to].append((received, sent))
                    self._go_on(to)
            elif what == "crashes":
                self._crash(at)
            elif what == "back":
                self._come(at)
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
        if self.crashes and moves:
            moves += [("crashes", rank) for rank in range(self.n) if rank not in self.gone]
        return moves + [("back", rank) for rank in sorted(self.gone) if self.come_back]

    def _crash(self, rank: int) -> None:
        self.crashes -= 1
        self.programs[rank].close()
        self.here[rank].clear()
        self.wants[rank] = None
        self.gone.add(rank)
        sync = self.algorithm.sync
        for server in sync.hear_of(rank, self.n):
            self.links[rank, server].append(Sent(message=sync.gone(), life=self.life[rank]))

    def _come(self, rank: int) -> None:
        sync, lost = self.algorithm.sync, self.states[rank]
        self.gone.remove(rank)
        self.life[rank] += 1
        start = torch.full_like(lost["params"], 1e6)  # nobody may be given it
        state = sync.init(self.algorithm, start, self.team[rank])
        self.states[rank] = sync.anew(self.algorithm, {**state, "step": lost["step"] + 1})
        self._begin(rank)

    def _begin(self, rank: int) -> None:
        sync = self.algorithm.sync
        self.programs[rank] = sync.round(self.algorithm, self.states[rank], self.team[rank])
        self._play(rank, None)

    def _go_on(self, rank: int, answer: Any = None, *, over: bool = False) -> None:
        effect = self.wants[rank]
        if isinstance(effect, Recv) and not over:
            answer = self._taken(rank, effect)
            if answer is None and not self._called(rank, effect):
                return
        elif isinstance(effect, Compute) and answer is None:
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
                    message = from_bytes(to_bytes(effect.message), effect.message.kinds)
                    sent = Sent(message=message, tag=effect.tag, life=self._life(rank, effect.to))
                    self.links[rank, effect.to].append(sent)
                    self.log.append((rank, effect.to, message))
                case Record():
                    self.records.append(effect)
                case SumShards():
                    answer = effect.partial
                case Now():
                    answer = 0.01 * self.n_moves
                case Recv():
                    answer = self._taken(rank, effect)
                    if answer is None and not self._called(rank, effect):
                        return
                case Compute():
                    return
                case _:
                    raise AssertionError(f"{effect} is of workers that meet")

    def _taken(self, rank: int, effect: Recv) -> Received | None:
        here = self.here[rank]
        kept = [(r, sent) for r, sent in here if not effect.drops(r.source, sent.tag)]
        here.clear()
        here.extend(kept)
        for at, (received, sent) in enumerate(here):
            if effect.wants(received.source, sent.tag):
                del here[at]
                assert received.message.kinds in (effect.kinds, effect.brief)
                if rank >= self.n:
                    self.heard[rank, received.source] = sent.life
                return received
        return None

    def _called(self, rank: int, effect: Recv) -> bool:
        return any(received.source == effect.unless for received, _ in self.here[rank])

    def _life(self, source: int, to: int) -> int:
        if source >= self.n:
            return self.heard.get((source, to), 0)
        return self.life[to if to < self.n else source]
