"""Plays players whose messages are taken in a given order, in one process: for their tests."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
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
    from numpy.typing import NDArray


class Replayed:
    """Workers and servers; each server takes what its list of messages says, and then no more.

    Each player goes on when what it wants is there, so the order between players is another one
    than it was. Workers compute so many gradients as `steps` says.
    """

    def __init__(
        self,
        algorithm: DataParallel,
        gradient: Gradient,
        start: torch.Tensor,
        n: int,
        lists: Sequence[NDArray[Any]],
        steps: Sequence[int],
        *,
        lr: float,
    ) -> None:
        self.algorithm, self.gradient, self.n = algorithm, gradient, n
        self._steps = steps
        self.team = team(algorithm, Layout.of({"w": tuple(start.shape)}), n, lr=lr)
        self.states = [algorithm.sync.init(algorithm, start.clone(), me) for me in self.team]
        self._left = [deque(map(int, rows["source"])) for rows in lists]
        self._mail: defaultdict[tuple[int, int], deque[tuple[int, Message]]] = defaultdict(deque)
        self._programs = [algorithm.sync.round(algorithm, s, me) for s, me in self._players()]
        self._wants: list[Any] = [next(each) for each in self._programs]
        while sum(map(self._goes_on, range(len(self.team)))):
            pass
        assert not any(self._left), "what was taken is taken again"

    def _players(self) -> Any:
        return zip(self.states, self.team, strict=True)

    def _goes_on(self, rank: int) -> bool:
        """Play one until it waits; whether it did anything."""
        count = 0
        while (answer := self._answer(rank, self._wants[rank])) is not None:
            count += 1
            try:
                self._wants[rank] = self._programs[rank].send(answer[0])
            except StopIteration as end:
                self.states[rank] = end.value
                me = self.team[rank]
                self._programs[rank] = self.algorithm.sync.round(self.algorithm, end.value, me)
                self._wants[rank] = next(self._programs[rank])
        return count > 0

    def _answer(self, rank: int, effect: Any) -> tuple[Any] | None:
        """The answer to what a player wants, if it is there."""
        match effect:
            case Compute():
                if effect.batch >= self._steps[rank]:
                    return None
                found = self.gradient(rank, effect.batch, effect.params)
                return (Computed(gradient=found, loss=0.0, weight=1.0, n_samples=1),)
            case Send():
                sent = from_bytes(to_bytes(effect.message), effect.message.kinds)
                self._mail[rank, effect.to].append((effect.tag, sent))
            case Now():
                return (0.0,)
            case SumShards():
                return (effect.partial,)
            case Recv():
                return self._taken(rank, effect)
            case _:
                assert isinstance(effect, Record)
        return (None,)

    def _taken(self, rank: int, effect: Recv) -> tuple[Received | None] | None:
        source = effect.source
        if source == ANY:
            rows = self._left[rank - self.n]
            if not rows:
                return None
            source = rows[0]
            if source < 0:
                rows.popleft()
                return (None,)
        mail = self._mail[source, rank]
        if not mail or mail[0][0] != effect.tag:
            return None
        if effect.source == ANY:
            self._left[rank - self.n].popleft()
        return (Received(source=source, message=mail.popleft()[1]),)
