"""Models that travel between processes: played again, killed, stopped, begun anew."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ADPSGD, AsyncPushSum, PartialReduce
from polyreme.algo.topology.graph import Complete
from polyreme.algo.vector import Layout
from polyreme.runtime import own
from polyreme.runtime.served.applied import read_taken
from polyreme.runtime.served.post import Post
from polyreme.runtime.transport.letters import Kind, Letter
from polyreme.runtime.transport.local import Address, Boxes
from replayed import Replayed
from served import team
from served_members import START, TARGET, gradient, members

torch.set_num_threads(1)
MEMBERS = [
    PartialReduce(group_size=2),
    PartialReduce(wait_s=0.01, weights="dynamic"),
    ADPSGD(),
    AsyncPushSum(graph=Complete()),
]


def _name(sync) -> str:
    return type(sync).__name__


each_member = pytest.mark.parametrize("sync", MEMBERS, ids=_name)
each_kind = pytest.mark.parametrize("sync", MEMBERS[1:], ids=_name)


def _of(sync) -> DataParallel:
    return DataParallel(rule=SGD(), sync=sync)


@pytest.mark.slice(1)
@each_member
def test_the_messages_that_servers_took_in_their_order_give_the_same_bits(sync, tmp_path) -> None:
    algorithm = _of(sync)
    with members(algorithm, 3, tmp_path) as run:
        run.all_push()
        run.pushed(30)
        there = run.rested()
    lists = [read_taken(tmp_path / f"taken-{at}.bin") for at in range(sync.n_servers(3))]
    assert min(map(len, lists)) >= 2
    assert sum(map(len, lists)) >= 30
    steps = [int(there[rank]["worker/0/step"]) for rank in range(3)]
    played = Replayed(algorithm, gradient, START, 3, lists, steps, lr=0.05)
    for rank, state in enumerate(played.states):
        for name, tensor in own.apart(state).items():
            if not name.endswith(("due_s", "left_s")):  # of a clock
                assert torch.equal(tensor, there[rank][name]), (rank, name)


def _came(folder: Path, n_servers: int) -> dict[tuple[int, int, int], list[int]]:
    """Numbers of what each server took of each life of each player, in order."""
    found: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for server in range(n_servers):
        for row in read_taken(folder / f"taken-{server}.bin"):
            if row["source"] >= 0 and row["number"] >= 0:
                who = (server, int(row["source"]), int(row["life"]))
                found[who].append(int(row["number"]))
    return found


@pytest.mark.slice(1)
@each_kind
def test_a_killed_worker_comes_back_and_others_do_not_wait(sync, tmp_path) -> None:
    with members(_of(sync), 3, tmp_path) as run:
        run.all_push()
        for _ in range(2):
            run.kill(1)
            run.until(0)
            run.until(2)
            run.pushed(30)
        run.until(1)
    for numbers in _came(tmp_path, sync.n_servers(3)).values():
        assert numbers == sorted(set(numbers))


@pytest.mark.long
@pytest.mark.parametrize("sync", [PartialReduce(group_size=2), ADPSGD()])
def test_a_stopped_worker_is_not_waited_for_longer_than_was_asked(sync, tmp_path) -> None:
    with members(_of(sync), 3, tmp_path, timeout_s=0.5) as run:
        run.all_push()
        run.kill(2, signal.SIGSTOP)
        run.pushed(20)
        rows = run.pushed(40)
        assert sum(int(row[0]) == 2 for row in rows) <= 5
        run.kill(2, signal.SIGCONT)
        run.until(2)


@pytest.mark.slice(1)
@pytest.mark.parametrize("sync", [PartialReduce(group_size=2), AsyncPushSum()])
def test_a_killed_server_comes_back_and_all_go_on(sync, tmp_path) -> None:
    with members(_of(sync), 3, tmp_path) as run:
        run.all_push()
        for _ in range(2):
            run.kill(3)
            run.pushed(40)
        run.all_push()
        there = run.rested()
    if not sync.remembers:  # what workers were answered is what they asked
        assert not any(there[rank]["unread"] for rank in range(3))
    if isinstance(sync, PartialReduce):  # it forgets nothing
        for numbers in _came(tmp_path, 1).values():
            assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.long
@pytest.mark.parametrize("sync", [ADPSGD(), AsyncPushSum(graph=Complete())], ids=_name)
def test_a_killed_keeper_goes_on_with_the_model_that_its_worker_has(sync, tmp_path) -> None:
    """Without a snapshot; it went back to the first model, and took all others with it."""
    with members(_of(sync), 2, tmp_path, pause_s=0.05, snapshot_s=1e6) as run:
        run.all_push()
        run.pushed(200)
        run.kill(2)
        run.pushed(4)
        assert (run.model(2) - TARGET).norm() < 0.1 * (START - TARGET).norm()


def _storm(sync, seed: int, n_moments: int, folder: Path) -> None:
    """Signals to all at random moments, while training goes on."""
    n = 4
    with members(_of(sync), n, folder, lr=0.02) as run:
        run.all_push()
        run.storm(seed, n_moments, apart_s=0.3)
        run.pushed(600, limit_s=300)
        for _ in range(4):
            run.all_push()
            run.pushed(200)
        for rank in sync.models_of(n):
            model = run.model(rank)
            assert (model - TARGET).norm() < 0.15
    if sync.remembers:
        for numbers in _came(folder, 1).values():
            assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.long
@each_member
@pytest.mark.parametrize("seed", [2, 3])
def test_fifty_signals_at_random_moments_end_no_run(sync, seed: int, tmp_path) -> None:
    _storm(sync, seed, 50, tmp_path)


def test_a_letter_to_an_earlier_life_does_not_hide_that_its_sender_was_begun_anew(tmp_path) -> None:
    """A worker that did not notice asked a keeper of before, and waited for ever."""
    algorithm, address = _of(ADPSGD()), Address(folder=tmp_path, token=b"a" * 16)
    me, keeper = team(algorithm, Layout.of({"w": (12,)}), 2)[0], 2
    post, box = Post(algorithm.sync, me, 1, address, lambda: None), Boxes(address, keeper, [0])
    box.send(0, Letter(Kind.SAID, keeper, 2, 1, 0, b"to life 0"))
    post.hear(5.0)
    assert post.counts() == {"unread": 0}
    assert post.again(keeper, 2)
    box.send(0, Letter(Kind.SAID, keeper, 2, 2, 1, b"to life 1"))
    post.hear(5.0)
    assert post.counts()["unread"] == 1
    assert not post.again(keeper, 2)
    assert post.counts()["unread"] == 1
    assert post.again(keeper, 3)  # it has forgotten what it said
    assert post.counts()["unread"] == 0
    box.close()
    post.close(0.0)
