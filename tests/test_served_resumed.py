"""What servers answer once more: after a checkpoint, after a server or a letter was lost."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed, Send
from polyreme.algo.packet import to_bytes
from polyreme.algo.rule import SGD
from polyreme.algo.sync import EASGD, R2SP, SSP, AsyncADMM, BackupWorkers
from polyreme.algo.vector import Layout
from polyreme.runtime import own
from polyreme.runtime.served.route import Members
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
        server._left(0, 0)
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


class _Resting(Members):
    """A run whose members answer what they are told to here, with a life each."""

    def __init__(self, algorithm: DataParallel, players: list[Any], states: list[Any]) -> None:
        self._sync, self._rested = algorithm.sync, False
        self._team = SimpleNamespace(
            n=N,
            algorithm=algorithm,
            workers=dict(enumerate(players[:N])),
            servers=dict(enumerate(players[N:], N)),
        )
        members = {rank: SimpleNamespace(life=0) for rank in range(len(players))}
        self._home = SimpleNamespace(servers=range(N, len(players)), members=members, buffers={})
        self._states = {
            rank: algorithm.sync.init(algorithm, START.clone(), me)
            for rank, me in enumerate(players)
        }
        self.given, self.killed, self.wanted = states, -1, list[Any]()

    def _asked(self, home, letters, *, needed=True):
        found = {}
        for rank, asked in letters.items():
            last = {f"last/{N}": torch.tensor(7)} if asked.kind is Kind.REST else {}
            body = save(last | own.apart(self.given[rank]))
            found[rank] = Letter(Kind.HERE, rank, home.members[rank].life, 0, 0, body)
            if asked.kind is Kind.SEND:
                self.wanted = json.loads(asked.body)
        if self.killed in letters:
            home.members[self.killed].life += 1
        return found


def _waiting(algorithm: DataParallel, players: list[Any], folder: Path) -> list[Any]:
    """States of two workers that pushed and have no answer yet, and of their server."""
    server, states = _begun(algorithm, players[N], folder), []
    for me, params in zip(players[:N], (START + 1, START - 3), strict=True):
        server._took(_push(algorithm, me, params))
        state = algorithm.sync.init(algorithm, params, me)
        states.append({**state, "awaits": {"0": 1}, "pushes": 1, "step": 1})
    return [*states, server.state]


def test_a_checkpoint_has_each_worker_of_easgd_after_its_own_pull(tmp_path) -> None:
    algorithm, players = _of(EASGD(local_steps=1, alpha=0.5))
    run = _Resting(algorithm, players, _waiting(algorithm, players, tmp_path))
    run.rest()
    models = [run.states()[rank]["params"] for rank in range(N)]
    torch.testing.assert_close(models[0] - START, torch.full_like(START, 1 - 0.5))
    torch.testing.assert_close(models[1] - START, torch.full_like(START, -3 + 1.75))
    assert [run.states()[rank]["awaits"] for rank in range(N)] == [{"0": 0}] * N


def test_one_killed_after_it_rested_is_waited_for_in_its_own_life(tmp_path) -> None:
    """What it had pushed then is lost with it, so that its state is of one that comes anew."""
    algorithm, players = _of(EASGD(local_steps=1, alpha=0.5))
    run = _Resting(algorithm, players, _waiting(algorithm, players, tmp_path))
    run.killed = 0
    run.rest()
    assert run.wanted == [[0, 0, 7], [1, 0, 7]]
    killed, other = (run.states()[rank] for rank in range(N))
    assert (killed["new"], killed["awaits"], killed["pushes"]) == (True, {"0": 0}, 1)
    assert not other["new"]


def test_one_that_rests_while_it_comes_asks_again_for_all(tmp_path) -> None:
    """What it asked for may be under way: an answer to an earlier life would be no beginning."""
    algorithm, players = _of(EASGD(local_steps=1, alpha=0.5))
    states = _waiting(algorithm, players, tmp_path)
    states[0] = {**states[0], "new": True}
    run = _Resting(algorithm, players, states)
    run.rest()
    came = run.states()[0]
    assert (came["new"], came["awaits"]) == (True, {"0": 0})
    assert torch.equal(came["params"], START + 1)
