"""A run's steps by players whose models travel, each in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import torch

from ...errors import RunError
from .. import own
from ..transport.letters import Kind, Letter
from ..transport.local import HOME
from . import mean
from .home import Home, loaded
from .route import PATIENCE_S, Members

_Told = Mapping[int, Mapping[str, torch.Tensor]]


class Among(Members):
    """As `Members`, where models are with workers or their keepers, and messages among them."""

    def begin(self) -> None:
        """Have all go on that rest."""
        if self._rested and self._home is not None:
            for rank in self._home.members:
                self._home.send(rank, Letter(Kind.GO, HOME))
        self._rested = False

    def settle(self) -> None:
        """Bring the mean of models into the stage, each as it is between two rounds."""
        home, team = self._home, self._team
        if home is None:
            team.settle(self)
            return
        models = self._sync.models_of(team.n)
        wanted = {rank: Letter(Kind.SEND, HOME) for rank in models if not home.members[rank].silent}
        given = self._asked(home, wanted, needed=models.start >= team.n)
        states = {
            rank: own.joined(loaded(given[rank]), _model(self._states[rank]))
            for rank in sorted(given)
        }
        if not states:
            raise RunError("nobody tells of a model")
        workers, servers = (
            [state for rank, state in states.items() if (rank >= team.n) == at_servers]
            for at_servers in (False, True)
        )
        self._take_buffers(home)
        whole = self._sync.whole(servers, workers)
        mean.write(home.folder, whole)
        team.gradients.put(whole)
        team.settle_buffers(self)

    def rest(self) -> None:
        """Have all come between rounds, and take all states once nothing is under way.

        Who does not answer is gone for the others, and comes anew.
        """
        home = self._home
        if home is None or self._rested:
            return
        end_s = time.monotonic() + 2 * PATIENCE_S
        told, still = self._told_of(home), False
        while not still:
            if time.monotonic() > end_s:
                raise RunError("messages that are under way do not come to an end")
            before, told = counts(told), self._told_of(home)
            still = before == counts(told) and self._still(home, told)
        for rank, state in self._states.items():
            if rank in told:
                self._states[rank] = own.joined(told[rank], state)
            else:
                step = max(state["step"], int(home.total(rank).step) + 1)
                self._states[rank] = self._sync.anew(self._team.algorithm, {**state, "step": step})
        self._take_buffers(home)
        self._rested = True

    def _told_of(self, home: Home) -> _Told:
        """States and counts of all who rest."""
        there = [rank for rank, member in home.members.items() if not member.silent]
        letters = {rank: Letter(Kind.REST, HOME) for rank in there}
        found = self._asked(home, letters, needed=False)
        told = {rank: loaded(letter) for rank, letter in found.items()}
        missing = [rank for rank in there if rank not in told]
        for rank in missing:
            if rank >= self._team.n:
                raise RunError(f"server {rank - self._team.n} does not answer for {PATIENCE_S:g} s")
            home.leave(rank)
        return self._told_of(home) if missing else told

    def _still(self, home: Home, told: _Told) -> bool:
        """Whether all has come that was sent to servers or by them."""

        def pairs() -> Iterator[tuple[int, int]]:
            for server in home.servers:
                for other in told:
                    if other != server:
                        yield from {(server, other), (other, server)}

        for source, to in pairs():
            sent, came = _count(told, source, f"sent/{to}"), _count(told, to, f"came/{source}")
            begun = (not sent and home.members[source].life) or (not came and home.members[to].life)
            if sent != came and not begun:
                return False
        return True


def counts(told: _Told) -> dict[int, dict[str, int]]:
    """Letters of each, by who told of them."""
    return {
        rank: {
            name: int(each) for name, each in tensors.items() if name.startswith(("sent/", "came/"))
        }
        for rank, tensors in told.items()
    }


def _count(told: _Told, rank: int, name: str) -> int:
    return int(told[rank][name]) if name in told[rank] else 0


def _model(state: Mapping[str, object]) -> dict[str, object]:
    """What is asked for to evaluate."""
    return {name: each for name, each in state.items() if name != "rule"}
