"""Workers and servers in processes: killed, stopped, begun anew; nothing lost, nothing twice."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Dense, TopK
from polyreme.algo.effects import Compute, Computed, Received, Recv, Send
from polyreme.algo.packet import from_bytes, to_bytes
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, SSP, OrLoMo, OrMo
from polyreme.algo.vector import Layout
from polyreme.errors import RunError
from polyreme.runtime.served.applied import read_applied
from polyreme.runtime.served.journal import Journal
from polyreme.runtime.served.server import Server
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import HOME, Address, Boxes, Office
from served import team
from served_members import START, TARGET, gradient, members, whole

torch.set_num_threads(1)


def _of(sync) -> DataParallel:
    return DataParallel(rule=SGD(), sync=sync)


@pytest.mark.long
@pytest.mark.parametrize("sync", [ASGD(), OrMo(), OrLoMo(local_steps=3)])
@pytest.mark.parametrize("kills", [0, 3])
def test_a_recorded_order_of_arrival_played_again_gives_the_same_bits(
    sync, kills: int, tmp_path
) -> None:
    """Also where the server was killed on the way: it is where it was."""
    algorithm = _of(sync)
    with members(algorithm, 3, tmp_path) as run:
        run.pushed(60 * sync.per_push)
        for _ in range(kills):
            run.kill(3)
            run.pushed(30 * sync.per_push)
    order = read_applied(tmp_path / "applied-0.bin")
    assert len(set(order["worker"])) == 3
    own = dict.fromkeys(range(3), 0)  # the version that each one's last push made
    for version, row in enumerate(order, 1):
        assert row["version"] == own[row["worker"]] or (
            kills and row["version"] > own[row["worker"]]
        )
        own[row["worker"]] = version
    assert torch.equal(_replayed(algorithm, order), _snapshot(tmp_path, 0))


def _replayed(algorithm: DataParallel, order) -> torch.Tensor:
    """The server's parameters, of each push in its turn at the version that it began at.

    One that asked for an answer that was lost began at a later version than its last push made.
    """
    sync, players = algorithm.sync, team(algorithm, Layout.of({"w": (12,)}), 3, lr=0.05)
    server = sync.init(algorithm, START.clone(), players[3])
    history = {0: server}
    for worker, _, number, version in order.tolist():
        me, begun = players[worker], history[version]
        held = {name: begun[name] for name in ("params", *sync.beside)}
        at = {"step": number * sync.per_push, "pushes": number, "versions": {"0": version}}
        state = {**sync.init(algorithm, START.clone(), me), **held, **at}
        message = _played(sync.round(algorithm, state, me), worker)
        server = _played(sync.round(algorithm, server, players[3]), worker, message)
        history[server["version"]] = server
    return server["params"]


def _played(program, worker: int, message=None):
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
        elif isinstance(effect, Send) and message is None:
            return to_bytes(effect.message)


def _snapshot(folder: Path, server: int) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / f"server-{server}.safetensors")["worker/0/params"]


def test_a_killed_worker_comes_back_and_others_do_not_wait(tmp_path) -> None:
    with members(_of(OrMo()), 3, tmp_path) as run:
        run.pushed(30)
        run.kill(1)
        rows = run.pushed(150)
        assert {int(row[0]) for row in rows} == {0, 1, 2}
    lives = {int(r["life"]) for r in read_applied(tmp_path / "applied-0.bin") if r["worker"] == 1}
    assert lives == {0, 1}
    whole(tmp_path, 1)


def test_a_stopped_worker_stops_nobody_else(tmp_path) -> None:
    with members(_of(ASGD()), 3, tmp_path) as run:
        run.pushed(30)
        run.kill(2, signal.SIGSTOP)
        time.sleep(0.2)
        run.pushed(0)
        rows = run.pushed(100)
        assert sum(int(row[0]) == 2 for row in rows) <= 5
        run.kill(2, signal.SIGCONT)
        rows = run.pushed(100)
        assert any(int(row[0]) == 2 for row in rows)
    whole(tmp_path, 1)


@pytest.mark.slice(1)
@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_server_has_all_that_was_pushed_once_it_is_back(servers: int, tmp_path) -> None:
    with members(_of(OrMo(servers=servers)), 3, tmp_path) as run:
        run.pushed(200)
        run.kill(3)
        run.pushed(200)
        run.kill(3 + servers - 1)
        run.pushed(200)
    whole(tmp_path, servers)


STORMY = [
    DataParallel(rule=SGD(), sync=OrMo(servers=2, momentum=0.5, ahead=ahead), compress_back=back)
    for ahead, back in ((0, Dense()), (1, Dense()), (0, TopK(ratio=0.34)), (1, TopK(ratio=0.34)))
]
each_stormy = pytest.mark.parametrize(
    "algorithm", STORMY, ids=lambda a: f"{a.sync.ahead}-{type(a.compress_back).__name__}"
)


@pytest.mark.long
def test_a_worker_and_then_its_server_killed_lose_nothing_that_was_applied(tmp_path) -> None:
    """No snapshot holds it, and nobody has it to send again."""
    with members(_of(OrMo()), 3, tmp_path, snapshot_s=60.0) as run:
        rows = run.pushed(60)
        run.kill(1)
        run.kill(3)
        rows += run.pushed(60)
    assert not (tmp_path / "journal-0-0.bin").exists()
    listed = Counter(read_applied(tmp_path / "applied-0.bin")["worker"].tolist())
    told = Counter(int(row[0]) for row in rows)
    assert all(listed[worker] >= count for worker, count in told.items())
    whole(tmp_path, 1)


def test_a_letter_that_was_half_written_is_not_dealt_with_again(tmp_path) -> None:
    path = tmp_path / "journal"
    letters = [
        Letter(Kind.PUSH, 1, 2, 3, 0, b"abc"),
        Letter(Kind.LEFT, 2),
        Letter(Kind.PUSH, 0, 0, 9, 0, bytes(range(200)) * 5),
    ]
    journal = Journal(path, new=True)
    for letter in letters:
        journal.add(letter)
    whole = path.read_bytes()
    for cut in (len(whole), len(whole) - 1, len(whole) - 1000, len(whole) - 1010):
        path.write_bytes(whole[:cut])
        again = Journal(path, new=False)
        assert list(again.letters()) == letters[: 3 if cut == len(whole) else 2]
        again.add(letters[0])
        assert list(Journal(path, new=False).letters())[-1] == letters[0]
    assert list(Journal(path, new=True).letters()) == []


def _storm(algorithm: DataParallel, seed: int, n_moments: int, folder: Path) -> None:
    """Signals to workers and servers at random moments, while training goes on."""
    servers = 2
    with members(algorithm, 3, folder, lr=0.02) as run:
        run.pushed(20)
        run.storm(seed, n_moments)
        run.pushed(600)
    whole(folder, servers)
    for server in range(servers):
        piece = TARGET[6 * server : 6 * server + 6]
        assert (_snapshot(folder, server) - piece).norm() < 0.1


@pytest.mark.slice(1)
@each_stormy
def test_signals_at_random_moments_lose_nothing(algorithm, tmp_path) -> None:
    _storm(algorithm, 1, 8, tmp_path)


@pytest.mark.long
@each_stormy
@pytest.mark.parametrize("seed", range(2, 8))
def test_fifty_signals_at_random_moments_lose_nothing(algorithm, seed: int, tmp_path) -> None:
    _storm(algorithm, seed, 50, tmp_path)


def test_letters_that_come_twice_or_too_early_or_from_an_earlier_life(tmp_path) -> None:
    """One push is applied once; what is missing is asked for; who is gone is not heard."""
    algorithm, address = _of(ASGD()), Address(folder=tmp_path, token=b"a" * 16)
    players = team(algorithm, Layout.of({"w": (12,)}), 2, lr=0.1)
    server = _server(algorithm, players[2], address)
    body = _push_body(algorithm, players[0])
    with Office(address, HOME) as home:
        thread = threading.Thread(target=server.play)
        thread.start()
        box = Boxes(address, 0, [2])

        def sent(kind: Kind, number: int, life: int = 1) -> tuple[Kind, int] | None:
            box.send(2, Letter(kind, 0, life, number, 0, body))
            answer = box.take(0.5)
            return None if answer is None else (answer.kind, answer.number)

        assert sent(Kind.PUSH, 0) == (Kind.ANSWER, 0)
        assert sent(Kind.PUSH, 0) == (Kind.ANSWER, 0)
        assert sent(Kind.PUSH, 2) == (Kind.HAVE, 0)
        assert sent(Kind.PUSH, 1) == (Kind.ANSWER, 1)
        assert sent(Kind.PUSH, 2, life=0) is None
        assert sent(Kind.ASK, 1) == (Kind.ANSWER, 1)
        assert sent(Kind.ASK, 5) == (Kind.HAVE, 1)
        assert sent(Kind.PUSH, 0, life=2) == (Kind.ANSWER, 0)
        home.take(1.0)
        home.send(2, Letter(Kind.END, HOME))
        thread.join(10)
        assert not thread.is_alive()
        box.close()
    assert server.state["version"] == 3
    rows = read_applied(tmp_path / "applied-0.bin")
    assert rows[["life", "number"]].tolist() == [(1, 0), (1, 1), (2, 0)]


def test_pushes_of_workers_that_rest_are_asked_for_when_home_wants_the_state(tmp_path) -> None:
    """A server that went back does not wait for those who wait for it, nor for an earlier life."""
    algorithm, address = _of(ASGD()), Address(folder=tmp_path, token=b"a" * 16)
    players = team(algorithm, Layout.of({"w": (12,)}), 2, lr=0.1)
    server = _server(algorithm, players[2], address)
    body = _push_body(algorithm, players[0])
    with Office(address, HOME) as home:
        thread = threading.Thread(target=server.play)
        thread.start()
        box = Boxes(address, 0, [2])
        box.send(2, Letter(Kind.PUSH, 0, 0, 0, 0, body))
        assert box.take(5.0).kind is Kind.ANSWER
        assert home.take(5.0).kind is Kind.UP
        assert home.take(5.0).kind is Kind.TOLD
        for life, last in ((0, 1), (1, 0)):
            home.send(2, Letter(Kind.SEND, HOME, 0, 1, 0, b"[[0, %d, %d]]" % (life, last)))
            asked = box.take(5.0)
            assert (asked.kind, asked.number) == (Kind.HAVE, last - 1)
            assert home.take(0.2) is None
            box.send(2, Letter(Kind.PUSH, 0, life, last, 0, body))
            assert box.take(5.0).kind is Kind.ANSWER
            assert {home.take(5.0).kind, home.take(5.0).kind} == {Kind.TOLD, Kind.HERE}
        home.send(2, Letter(Kind.END, HOME))
        thread.join(10)
        assert not thread.is_alive()
        box.close()


def _server(algorithm: DataParallel, me, address: Address) -> Server:
    """One in this process, in the folder of its sockets."""
    return Server(
        sync=algorithm.sync,
        algorithm=algorithm,
        me=me,
        state=algorithm.sync.init(algorithm, START.clone(), me),
        address=address,
        folder=address.folder,
        life=0,
        snapshot_s=60.0,
    )


def _push_body(algorithm: DataParallel, me) -> bytes:
    """A push as it travels: a worker's first round."""
    program = algorithm.sync.round(algorithm, algorithm.sync.init(algorithm, START.clone(), me), me)
    next(program)
    found = Computed(gradient=START, loss=0.0, weight=1.0, n_samples=1)
    return bytes(to_bytes(program.send(found).message).numpy().data)


def test_a_worker_that_says_nothing_is_not_waited_for_longer_than_was_asked(tmp_path) -> None:
    with members(_of(SSP(staleness=1)), 3, tmp_path, timeout_s=1.0) as run:
        run.pushed(30)
        run.kill(2, signal.SIGSTOP)
        rows = run.pushed(200)
        assert sum(int(row[0]) == 2 for row in rows) <= 10
        run.kill(2, signal.SIGCONT)
        rows = run.pushed(300)
        assert any(int(row[0]) == 2 for row in rows)


def test_letters_without_the_run_s_token_are_refused(tmp_path) -> None:
    refused = []
    address = Address(folder=tmp_path, token=b"a" * 16)
    with Office(address, 7, lambda: refused.append(1)) as office:
        stranger = Boxes(Address(folder=tmp_path, token=b"b" * 16), 1, [7])
        friend = Boxes(address, 1, [7])
        stranger.send(7, Letter(Kind.PUSH, 1, 0, 0, 0, b"x"))
        assert office.take(0.5) is None
        assert refused == [1]
        stranger.close()
        friend.send(7, Letter(Kind.PUSH, 1, 0, 5, 0, b"y"))
        letter = office.take(2.0)
        assert letter is not None
        assert (letter.kind, letter.number, bytes(letter.body)) == (Kind.PUSH, 5, b"y")
        friend.close()


def test_a_letter_in_another_s_name_is_refused(tmp_path) -> None:
    address = Address(folder=tmp_path, token=b"a" * 16)
    with Office(address, 7) as office:
        box = Boxes(address, 1, [7])
        box.send(7, Letter(Kind.PUSH, 2, 0, 0, 0, b"x"))
        assert office.take(0.5) is None
        box.close()


def test_a_server_begun_anew_does_not_wait_for_who_was_silent_before(tmp_path) -> None:
    """What it was told of them while it was stopped is lost with it."""
    with members(_of(SSP(staleness=1)), 3, tmp_path, timeout_s=1.0) as run:
        run.pushed(30)
        run.kill(3, signal.SIGSTOP)
        run.kill(2, signal.SIGSTOP)
        end_s = time.monotonic() + 30
        while not run.home.members[2].silent and time.monotonic() < end_s:
            time.sleep(0.02)
        assert run.home.members[2].silent
        run.kill(3)
        rows = run.pushed(200, limit_s=15.0)
        assert {int(row[0]) for row in rows[100:]} == {0, 1}
        run.kill(2, signal.SIGCONT)


def test_the_end_of_the_process_that_members_are_forked_from_is_said(tmp_path) -> None:
    with members(_of(ASGD()), 2, tmp_path) as run:
        run.pushed(10)
        run.nursery._process.kill()
        with pytest.raises(RunError, match="forked from was killed"):
            run.pushed(10**6, limit_s=15.0)
