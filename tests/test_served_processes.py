"""Workers and servers in processes: killed, stopped, begun anew; nothing lost, nothing twice."""

from __future__ import annotations

import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ASGD, OrLoMo, OrMo
from polyreme.runtime.served.applied import read_applied
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import Address, Boxes, Office
from served import Post
from served_members import START, TARGET, gradient, members

torch.set_num_threads(1)


def _of(sync) -> DataParallel:
    return DataParallel(rule=SGD(), sync=sync)


def _whole(folder: Path, servers: int) -> None:
    """Of each life of each worker the list has every push from the first to the last, once."""
    for server in range(servers):
        numbers: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row in read_applied(folder / f"applied-{server}.bin"):
            numbers[int(row["worker"]), int(row["life"])].append(int(row["number"]))
        assert numbers
        for who, found in numbers.items():
            assert found == list(range(len(found))), (server, who)


@pytest.mark.parametrize("sync", [ASGD(), OrMo(), OrLoMo(local_steps=3)])
def test_a_recorded_order_of_arrival_played_again_gives_the_same_bits(sync, tmp_path) -> None:
    algorithm = _of(sync)
    with members(algorithm, 3, tmp_path) as run:
        run.pushed(60 * sync.per_push)
    order = read_applied(tmp_path / "applied-0.bin")
    assert len(set(order["worker"])) == 3
    post = Post(algorithm, gradient, START, 3, lr=0.05)
    for row in order:
        assert post.states[row["worker"]]["versions"]["0"] == row["version"]
        post.arrive(int(row["worker"]))
    kept = _snapshot(tmp_path, 0)
    assert torch.equal(post.params, kept)


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
    _whole(tmp_path, 1)


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
    _whole(tmp_path, 1)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_killed_server_has_all_that_was_pushed_once_it_is_back(servers: int, tmp_path) -> None:
    with members(_of(OrMo(servers=servers)), 3, tmp_path) as run:
        run.pushed(200)
        run.kill(3)
        run.pushed(200)
        run.kill(3 + servers - 1)
        run.pushed(200)
    _whole(tmp_path, servers)


def _storm(seed: int, n_moments: int, folder: Path) -> None:
    """Signals to workers and servers at random moments, while training goes on."""
    drawn = random.Random(seed)
    n, servers = 3, 2
    with members(_of(OrMo(servers=servers, momentum=0.5)), n, folder, lr=0.02) as run:
        run.pushed(20)
        for _ in range(n_moments):
            time.sleep(drawn.uniform(0.0, 0.15))
            member = drawn.randrange(n + servers)
            if drawn.random() < 0.5:
                run.kill(member)
            else:
                run.kill(member, signal.SIGSTOP)
                time.sleep(drawn.uniform(0.0, 0.15))
                run.kill(member, signal.SIGCONT)
        while not run.home.told.empty():
            run.home.told.get()
        run.pushed(600)
    _whole(folder, servers)
    for server in range(servers):
        piece = TARGET[6 * server : 6 * server + 6]
        assert (_snapshot(folder, server) - piece).norm() < 0.1


def test_signals_at_random_moments_lose_nothing(tmp_path) -> None:
    _storm(1, 8, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 8))
def test_fifty_signals_at_random_moments_lose_nothing(seed: int, tmp_path) -> None:
    _storm(seed, 50, tmp_path)


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
