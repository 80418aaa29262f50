"""BASGD in processes: killed and stopped workers and server; its clock is in the journal."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from basgd import NEVER_S
from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Compute, Computed, Now, Received, Recv, Send, Suspect
from polyreme.algo.packet import from_bytes, to_bytes
from polyreme.algo.rule import SGD
from polyreme.algo.sync import BASGD
from polyreme.algo.vector import Layout
from polyreme.runtime.served.applied import read_applied
from polyreme.runtime.served.server import Server
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import HOME, Address, Boxes, Office
from served import team
from served_members import START, TARGET, gradient, members, whole

torch.set_num_threads(1)


def _of(sync: BASGD, **more: Any) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


# In processes of their own ----------------------------------------------------------------------


@pytest.mark.parametrize("kills", [0, 3])
@pytest.mark.parametrize("aggregate", [None, MajorityVote()], ids=str)
@pytest.mark.slice(1)
def test_a_recorded_order_of_arrival_played_again_gives_the_same_bits(
    kills: int, aggregate: Any, tmp_path
) -> None:
    """Also where the server was killed on the way, with buffers half full."""
    algorithm = _of(BASGD(buffers=2), **({} if aggregate is None else {"aggregate": aggregate}))
    with members(algorithm, 3, tmp_path) as run:
        run.pushed(60)
        for _ in range(kills):
            run.kill(3)
            run.pushed(30)
    order = read_applied(tmp_path / "applied-0.bin")
    assert len(set(order["worker"])) == 3
    assert order["version"].max() > 10
    replayed, kept = _replayed(algorithm, order), _snapshot(tmp_path, 0)
    assert torch.equal(replayed["params"], kept["worker/0/params"])
    for number, total in replayed["sums"].items():
        assert torch.equal(total, kept[f"worker/0/sums/{number}"])
    assert {b: int(kept[f"worker/0/counts/{b}"]) for b in ("0", "1")} == replayed["counts"]


def _replayed(algorithm: DataParallel, order: Any) -> dict[str, Any]:
    """The server's state, of each push in its turn at the version that it began at."""
    sync, players = algorithm.sync, team(algorithm, Layout.of({"w": (12,)}), 3, lr=0.05)
    server = sync.init(algorithm, START.clone(), players[3])
    params = {0: server["params"]}
    for worker, _, number, version in order.tolist():
        me = players[worker]
        at = {"step": number, "pushes": number, "versions": {"0": version}}
        state = {**sync.init(algorithm, START.clone(), me), "params": params[version], **at}
        message = _played(sync.round(algorithm, state, me), worker)
        server = _played(sync.round(algorithm, server, players[3]), worker, message)
        params[server["version"]] = server["params"]
    return server


def _played(program: Any, worker: int, message: Any = None) -> Any:
    """What a worker sends, or the state of a server that took a message of it."""
    answer = None
    while True:
        try:
            effect = program.send(answer)
        except StopIteration as end:
            return end.value
        answer = None
        if isinstance(effect, Compute):
            found = gradient(worker, effect.batch, effect.params)
            answer = Computed(gradient=found, loss=0.0, weight=1.0, n_samples=1)
        elif isinstance(effect, Recv):
            answer = Received(source=worker, message=from_bytes(message, effect.kinds))
        elif isinstance(effect, Now):
            answer = 0.0
        elif isinstance(effect, Send) and message is None:
            return to_bytes(effect.message)
        assert not isinstance(effect, Suspect)


def _snapshot(folder: Path, server: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"server-{server}.safetensors")


def _versions(folder: Path, worker: int) -> list[int]:
    """Those that a worker's pushes began at."""
    rows = read_applied(folder / "applied-0.bin")
    return [int(row["version"]) for row in rows if row["worker"] == worker]


@pytest.mark.long
def test_a_stopped_worker_alone_in_its_buffer_stalls_all_without_a_timeout(tmp_path) -> None:
    with members(_of(BASGD(buffers=2, timeout_s=NEVER_S)), 3, tmp_path) as run:
        run.all_push()
        run.kill(1, signal.SIGSTOP)
        run.pushed(100)  # of which some were on their way
        rows = run.pushed(200)
        assert {row.worker for row in rows} == {0, 2}
        assert all(row.suspects == () for row in rows)
        run.kill(1, signal.SIGCONT)
    assert len(set(_versions(tmp_path, 0)[-50:-20])) == 1


@pytest.mark.parametrize("server_too", [False, True])
@pytest.mark.slice(1)
def test_a_stopped_worker_alone_in_its_buffer_is_dealt_around(server_too: bool, tmp_path) -> None:
    """Also where the server is killed meanwhile; back again, it is in another's buffer."""
    with members(_of(BASGD(buffers=2, timeout_s=0.3)), 3, tmp_path) as run:
        run.all_push()
        run.kill(1, signal.SIGSTOP)
        rows = run.pushed(100)
        if server_too:
            run.kill(3)
        end_s = time.monotonic() + 60
        while all(1 not in row.suspects for row in rows) and time.monotonic() < end_s:
            rows += run.pushed(20)
        assert any(row.suspects == (1,) for row in rows)
        run.pushed(200)
        run.kill(1, signal.SIGCONT)
        run.until(1)
        run.pushed(50)
    assert len(set(_versions(tmp_path, 0)[-50:])) > 20
    kept = _snapshot(tmp_path, 0)
    assert [int(kept[f"worker/0/buffer/{w}"]) for w in range(3)] == [0, 0, 1]


def test_a_killed_worker_is_waited_for_and_comes_back_to_its_buffer(tmp_path) -> None:
    with members(_of(BASGD(buffers=3)), 3, tmp_path) as run:
        run.pushed(30)
        run.kill(1)
        rows = run.pushed(150)
        assert {row.worker for row in rows} == {0, 1, 2}
        run.kill(1)
        run.kill(3)
        run.until(1)
        run.pushed(100)
    assert len(set(_versions(tmp_path, 0)[-30:])) > 3


def _storm(seed: int, n_moments: int, folder: Path) -> None:
    """Signals to workers and servers at random moments, while training goes on."""
    servers = 2
    algorithm = _of(BASGD(buffers=2, servers=servers, timeout_s=0.2))
    with members(algorithm, 4, folder, lr=0.04) as run:
        run.pushed(20)
        run.storm(seed, n_moments, stopped_s=0.5)
        run.pushed(1000)
    whole(folder, servers)
    for server in range(servers):
        piece = TARGET[6 * server : 6 * server + 6]
        assert (_snapshot(folder, server)["worker/0/params"] - piece).norm() < 0.1


@pytest.mark.long
def test_signals_at_random_moments_lose_nothing(tmp_path) -> None:
    _storm(1, 8, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 6))
def test_fifty_signals_at_random_moments_lose_nothing(seed: int, tmp_path) -> None:
    _storm(seed, 50, tmp_path)


# One server, by letters -------------------------------------------------------------------------


def _server(algorithm: DataParallel, me: Any, address: Address, life: int) -> Server:
    return Server(
        sync=algorithm.sync,
        algorithm=algorithm,
        me=me,
        state=algorithm.sync.init(algorithm, START.clone(), me),
        address=address,
        folder=address.folder,
        life=life,
        snapshot_s=60.0,
    )


def _push(algorithm: DataParallel, me: Any) -> bytes:
    """A push as it travels: a worker's first round."""
    program = algorithm.sync.round(algorithm, algorithm.sync.init(algorithm, START.clone(), me), me)
    next(program)
    found = Computed(gradient=START + me.rank, loss=0.0, weight=1.0, n_samples=1)
    return bytes(to_bytes(program.send(found).message).numpy().data)


class _Serving:
    """A server in a thread of this process, and home."""

    def __init__(self, server: Server, address: Address) -> None:
        self.server, self._home = server, Office(address, HOME)
        self._thread = threading.Thread(target=server.play)
        self._thread.start()

    def told(self) -> list[Letter]:
        """What home was told, until it is told nothing more for a while."""
        letters = []
        while (letter := self._home.take(0.5)) is not None:
            letters.append(letter)
        return [letter for letter in letters if letter.kind is Kind.TOLD]

    def end(self) -> None:
        self._home.send(self.server.me.rank, Letter(Kind.END, HOME))
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._home.close()


def test_a_server_deals_again_at_the_times_at_which_it_dealt(tmp_path) -> None:
    """It goes by its journal: begun anew it plays in no time what took seconds before."""
    algorithm, token = _of(BASGD(buffers=2, timeout_s=0.2)), b"a" * 16
    players = team(algorithm, Layout.of({"w": (12,)}), 3, lr=0.1)
    first = Address(folder=tmp_path / "first", token=token)
    first.folder.mkdir()
    run = _Serving(_server(algorithm, players[3], first, 0), first)
    boxes = {worker: Boxes(first, worker, [3]) for worker in (0, 2)}
    for number in range(5):
        for worker, box in boxes.items():
            box.send(3, Letter(Kind.PUSH, worker, 0, number, 0, _push(algorithm, players[worker])))
            answer = box.take(5.0)
            assert answer is not None
            assert (answer.kind, answer.number) == (Kind.ANSWER, number)
        time.sleep(0.15)
    told = run.told()
    state = run.server.state
    assert state["version"] > 0
    assert state["buffer"] == {"0": 0, "1": 0, "2": 1}

    second = Address(folder=tmp_path / "second", token=token)
    shutil.copytree(first.folder, second.folder, ignore=lambda _, names: _but_journals(names))
    run.end()
    again = _Serving(_server(algorithm, players[3], second, 1), second)
    assert [letter.body for letter in again.told()] == [letter.body for letter in told]
    for key in ("params", "sums"):
        torch.testing.assert_close(again.server.state[key], state[key], rtol=0, atol=0)
    for key in ("counts", "buffer", "pushed", "since_s", "version"):
        assert again.server.state[key] == state[key]
    assert again.server._now_s >= state["since_s"]
    again.end()
    for box in boxes.values():
        box.close()


def _but_journals(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("journal")]


def test_a_server_that_was_stopped_takes_nobody_for_silent(tmp_path, monkeypatch) -> None:
    """Its clock goes on by no more than a turn over a gap in which it did not run."""
    algorithm = _of(BASGD(buffers=2, timeout_s=5.0))
    players = team(algorithm, Layout.of({"w": (12,)}), 3, lr=0.1)
    address, gone_s = Address(folder=tmp_path, token=b"a" * 16), [0.0]
    clock = time.monotonic
    monkeypatch.setattr(
        "polyreme.runtime.served.server.time.monotonic", lambda: clock() + gone_s[0]
    )
    run = _Serving(_server(algorithm, players[3], address, 0), address)
    box = Boxes(address, 0, [3])
    for number in range(3):
        box.send(3, Letter(Kind.PUSH, 0, 0, number, 0, _push(algorithm, players[0])))
        assert box.take(5.0) is not None
        gone_s[0] += 100.0
    assert run.server._now_s < 100.0
    assert len(run.told()) == 3
    assert run.server.state["since_s"] == 0.0
    run.end()
    box.close()
