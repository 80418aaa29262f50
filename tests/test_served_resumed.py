"""What servers answer once more: after a checkpoint, after a server or a letter was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed, Send
from polyreme.algo.packet import to_bytes
from polyreme.algo.rule import SGD
from polyreme.algo.sync import EASGD, R2SP, SSP, AsyncADMM, BackupWorkers
from polyreme.algo.vector import Layout
from polyreme.runtime import own
from polyreme.runtime.served.server import Server
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import Address
from served import team
from served_members import START

torch.set_num_threads(1)
N = 2


class _Office:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Letter]] = []

    def send(self, to: int, letter: Letter) -> None:
        self.sent.append((to, letter))


def _of(sync) -> tuple[DataParallel, list[Any]]:
    algorithm = DataParallel(rule=SGD(), sync=sync)
    return algorithm, team(algorithm, Layout.of({"w": (12,)}), N, lr=0.1)


def _begun(algorithm: DataParallel, me, folder: Path, state=None, life: int = 0) -> Server:
    """A server at work, whose letters are kept."""
    folder.mkdir(exist_ok=True)
    server = Server(
        sync=algorithm.sync,
        algorithm=algorithm,
        me=me,
        state=state or algorithm.sync.init(algorithm, START.clone(), me),
        address=Address(folder=folder, token=b"a" * 16),
        folder=folder,
        life=life,
        snapshot_s=60.0,
    )
    server._office, server._home = _Office(), _Office()
    server._restore()
    return server


def _push(algorithm: DataParallel, me, params: torch.Tensor, number: int = 0) -> Letter:
    """The first push of a worker that has these parameters."""
    program = algorithm.sync.round(algorithm, algorithm.sync.init(algorithm, params, me), me)
    effect = next(program)
    while not isinstance(effect, Send):
        effect = program.send(Computed(gradient=params, loss=0.0, weight=1.0, n_samples=1))
    body = bytes(to_bytes(effect.message).numpy().data)
    return Letter(Kind.PUSH, me.rank, 0, number, 0, body)


@pytest.mark.parametrize(
    "sync",
    [SSP(staleness=0), BackupWorkers(backups=0), R2SP(), AsyncADMM(barrier=2, delay=10)],
    ids=lambda sync: type(sync).__name__,
)
def test_one_that_waits_in_a_checkpoint_waits_on_when_the_run_goes_on(sync, tmp_path) -> None:
    """It asks for its answer, and has none before the other has pushed."""
    algorithm, players = _of(sync)
    first = _begun(algorithm, players[N], tmp_path / "first")
    first._took(_push(algorithm, players[1], START.clone()))
    assert not first._office.sent
    state = own.joined(
        own.apart(first.state), algorithm.sync.init(algorithm, START.clone(), players[N])
    )
    again = _begun(algorithm, players[N], tmp_path / "again", state)
    again._took(Letter(Kind.ASK, 1, 0, -1))
    assert not again._office.sent
    again._took(_push(algorithm, players[0], START.clone()))
    answers = [(to, letter.kind, letter.number) for to, letter in again._office.sent]
    assert sorted(answers) == [(0, Kind.ANSWER, 0), (1, Kind.ANSWER, -1)]
    again._took(Letter(Kind.ASK, 1, 0, -1))  # the answer was lost
    assert again._office.sent[-1][0] == 1


@pytest.mark.parametrize("lost", ["a letter", "the server", "the worker, taken for gone"])
def test_an_answer_of_easgd_asked_for_again_is_the_pull_of_who_asks(lost: str, tmp_path) -> None:
    """Whoever came since, what it loses is what the centre gained of it."""
    algorithm, players = _of(EASGD(local_steps=1, alpha=0.5))
    server = _begun(algorithm, players[N], tmp_path)
    server._took(_push(algorithm, players[0], START + 1))
    server._took(_push(algorithm, players[1], START - 3))
    (_, right), (_, other) = server._office.sent
    if lost == "the server":
        server = _begun(algorithm, players[N], tmp_path, life=1)
    elif lost != "a letter":
        server._left(0)
        server._took(_push(algorithm, players[1], START - 3, 1))
    server._took(Letter(Kind.ASK, 0, 0, 0))
    to, again = server._office.sent[-1]
    assert (to, again.kind, again.number) == (0, Kind.ANSWER, 0)
    pull = _vector(again)
    torch.testing.assert_close(pull, torch.full_like(pull, 0.5))
    assert torch.equal(pull, _vector(right))
    assert not torch.equal(pull, _vector(other))


def _vector(answer: Letter) -> torch.Tensor:
    """The one vector of an answer, behind its version."""
    return torch.frombuffer(bytearray(answer.body), dtype=torch.float64)[-12:]
