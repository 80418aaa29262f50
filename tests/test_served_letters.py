"""A server and its letters without processes: what is asked for again, and what is listed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed
from polyreme.algo.packet import to_bytes
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, R2SP, AsyncADMM, BackupWorkers
from polyreme.algo.vector import Layout
from polyreme.runtime.served.applied import read_applied
from polyreme.runtime.served.server import Server
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import HOME, Address
from served import team
from served_members import START

torch.set_num_threads(1)


class _Sent:
    """In place of sockets: what was sent, to whom."""

    def __init__(self) -> None:
        self.letters: list[tuple[int, Letter]] = []

    def send(self, to: int, letter: Letter) -> None:
        self.letters.append((to, letter))

    def kinds(self, to: int) -> list[Kind]:
        return [letter.kind for other, letter in self.letters if other == to]


class _Alone(Server):
    """A server of two workers without sockets."""

    @classmethod
    def of(cls, sync, folder: Path) -> _Alone:
        algorithm = DataParallel(rule=SGD(), sync=sync)
        players = team(algorithm, Layout.of({"w": (12,)}), 2, lr=0.1)
        server = cls(
            sync=sync,
            algorithm=algorithm,
            me=players[2],
            state=sync.init(algorithm, START.clone(), players[2]),
            address=Address(folder=folder, token=b"a" * 16),
            folder=folder,
            life=0,
            snapshot_s=60.0,
        )
        server._office, server._home = _Sent(), _Sent()
        server._restore()
        server.workers = players[:2]
        return server

    def push(self, worker: int, number: int, life: int = 0) -> None:
        """One comes, that began at the parameters of now."""
        me, algorithm = self.workers[worker], self.algorithm
        state = {
            **self.sync.init(algorithm, START.clone(), me),
            "versions": {"0": self.state["version"]},
        }
        program = self.sync.round(algorithm, state, me)
        next(program)
        found = Computed(gradient=START, loss=0.0, weight=1.0, n_samples=1)
        effect = program.send(found)
        while isinstance(getattr(effect, "params", None), torch.Tensor):  # of local steps
            effect = program.send(found)
        body = bytes(to_bytes(effect.message).numpy().data)
        self._took(Letter(Kind.PUSH, worker, life, number, 0, body))


def test_one_gap_is_asked_for_once_however_much_follows_it(tmp_path) -> None:
    server = _Alone.of(ASGD(), tmp_path)
    server.push(0, 0)
    for number in range(2, 60):
        server.push(0, number)
    assert server._office.kinds(0).count(Kind.HAVE) == 1
    for number in range(1, 60):
        server.push(0, number)
    assert server.state["version"] == 60
    server.push(0, 61)
    assert server._office.kinds(0).count(Kind.HAVE) == 2


def test_a_push_that_came_long_ago_is_not_answered_again(tmp_path) -> None:
    server = _Alone.of(ASGD(), tmp_path)
    for number in (0, 1, 0):
        server.push(0, number)
    assert server._office.kinds(0) == [Kind.ANSWER] * 2
    server.push(0, 1)
    assert server._office.kinds(0) == [Kind.ANSWER] * 3


def test_news_of_the_end_of_an_earlier_life_does_not_end_a_later_one(tmp_path) -> None:
    server = _Alone.of(R2SP(), tmp_path)
    server._took(Letter(Kind.HELLO, 1, 1))
    server.push(1, 0, life=1)  # waits for its turn
    server._asked(Letter(Kind.LEFT, HOME, 0, 1, 0))
    server.push(0, 0)
    assert server.state["version"] == 2
    server._asked(Letter(Kind.LEFT, HOME, 0, 1, 1))
    assert not server.state["present"]["1"]


@pytest.mark.parametrize(
    "sync", [R2SP(), BackupWorkers(backups=0), AsyncADMM(barrier=2, local_steps=1)]
)
def test_the_list_has_pushes_that_waited_too(sync, tmp_path) -> None:
    server = _Alone.of(sync, tmp_path)
    order = [(worker, number) for number in range(4) for worker in (1, 0)]
    for worker, number in order:
        server.push(worker, number)
    server._list.flush()
    rows = read_applied(tmp_path / "applied-0.bin")
    assert rows[["worker", "number"]].tolist() == order
