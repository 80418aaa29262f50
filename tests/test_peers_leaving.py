"""Syncs whose models travel, with workers that crash and come back: nobody waits for the gone."""

from __future__ import annotations

import math
import random

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD
from polyreme.algo.sync import ADPSGD, AsyncPushSum, PartialReduce
from polyreme.algo.sync.partial_reduce import _FORMED, _TAKEN
from polyreme.algo.topology.graph import Complete
from polyreme.sim.compute import Constant, LogNormal
from polyreme.sim.faults import Crash, Join, RandomCrashes
from polyreme.sim.network import Uniform
from scattered import Scattered
from served import simulated

torch.set_num_threads(1)
MEMBERS = [
    PartialReduce(group_size=2),
    PartialReduce(group_size=3, filter_period=2, weights="dynamic"),
    PartialReduce(wait_s=0.5),
    ADPSGD(),
    AsyncPushSum(),
]
each_member = pytest.mark.parametrize("sync", MEMBERS, ids=lambda sync: type(sync).__name__)


def _nothing(_rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(w)


def _pull(rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
    return w - rank


def _start() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64)


def _starts(n: int) -> list[torch.Tensor]:
    return [_start() * (1 + worker) + worker for worker in range(n)]


def _of(sync) -> DataParallel:
    return DataParallel(rule=SGD(), sync=sync)


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


# Partial reduce -------------------------------------------------------------------------------


class Ledger:
    """Reads what the controller says: each group that is taken makes its members' models alike."""

    def __init__(self, starts: list[torch.Tensor]) -> None:
        self.models = dict(enumerate(starts))
        self.formed: dict[int, list[float]] = {}
        self.taken: list[tuple[int, list[float]]] = []
        self.all_gone = False  # so that models of those who come count
        self._said: set[int] = set()
        self._seen = 0

    def read(self, played: Scattered) -> None:
        for source, _, message in played.log[self._seen :]:
            if source != played.n:
                continue
            said, group, _, _, *weights = message.packets[0].decode().tolist()
            if said == _FORMED:
                self.formed[int(group)] = weights
                new = played.states[played.n]["new"]
                self.all_gone |= any(w > 0 and new[str(i)] for i, w in enumerate(weights))
            elif said == _TAKEN and int(group) not in self._said:
                self._said.add(int(group))
                weights = self.formed[int(group)]
                members = {w: weight for w, weight in enumerate(weights) if weight >= 0}
                mean = sum(weight * self.models[w] for w, weight in members.items() if weight)
                self.models |= dict.fromkeys(members, mean)
                self.taken.append((int(group), weights))
        self._seen = len(played.log)


def _taken_by_all_or_none(sync: PartialReduce, seed: int) -> tuple[int, int]:
    """Models are what the groups that were taken make of them, of every worker that has one."""
    drawn = random.Random(seed)
    n = drawn.randint(2, 6)
    starts = _starts(n)
    ledger = Ledger(starts)
    crashes = drawn.randint(1, 8)
    played = Scattered(
        _of(sync), _nothing, starts, seed=seed, batches=30, crashes=crashes, after=ledger.read
    ).run()
    if ledger.all_gone:
        return 0, 0
    for worker, state in enumerate(played.states[:n]):
        if not state["new"]:
            _close(state["params"], ledger.models[worker])
    for group, weights in ledger.taken:
        members = [weight for weight in weights if weight >= 0]
        assert abs(sum(members) - 1) < 1e-12, group
        if sync.weights == "constant":
            assert len({weight for weight in members if weight}) == 1
    assert not any(played.states[n]["in"].values())
    return len(ledger.formed), len(ledger.taken)


@pytest.mark.parametrize("sync", MEMBERS[:3])
def test_a_group_s_mean_is_taken_by_all_or_by_none(sync) -> None:
    counts = [_taken_by_all_or_none(sync, seed) for seed in range(15)]
    formed, taken = map(sum, zip(*counts, strict=True))
    assert taken > 150
    assert formed > taken  # some were dropped


@pytest.mark.long
@pytest.mark.parametrize("part", range(5))
def test_a_group_s_mean_is_taken_by_all_or_by_none_in_many_orders(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        _taken_by_all_or_none(MEMBERS[seed % 3], seed)


def test_the_mean_of_those_that_stay_is_unmoved_by_a_group_that_one_leaves() -> None:
    """A worker goes while a group of all is under way; the others average without it."""
    for seed in range(60):
        starts = _starts(4)
        played = Scattered(
            _of(PartialReduce(group_size=4)), _nothing, starts, seed=seed, batches=1, crashes=1
        )
        played.come_back = False
        played.run()
        (gone,) = played.gone
        stay = [worker for worker in range(4) if worker != gone]
        models = [played.states[worker]["params"] for worker in stay]
        all_of_them = torch.stack(starts).mean(0)
        others = torch.stack([starts[worker] for worker in stay]).mean(0)
        mean = all_of_them if (models[0] - all_of_them).norm() < 1e-9 else others
        for model in models:
            _close(model, mean)


# Keepers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [ADPSGD(), AsyncPushSum(), AsyncPushSum(graph=Complete())])
@pytest.mark.parametrize("seed", range(10))
def test_what_keepers_have_together_is_unmoved_by_crashes(sync, seed: int) -> None:
    n, starts = 5, _starts(5)
    total = torch.stack(starts).sum(0)

    def kept(played: Scattered) -> None:
        said = [
            (message.packets[0].decode().tolist(), message.packets[1].decode())
            for source, to, message in played.under_way
            if min(source, to) >= n and len(message.packets) > 1
        ]
        moved = [vector for (what, *_), vector in said if type(sync) is AsyncPushSum or what == 2.0]
        _close(sum([state["params"] for state in played.servers] + moved), total)
        if type(sync) is AsyncPushSum:
            weights = [s["weight"] for s in played.servers] + [numbers[0] for numbers, _ in said]
            assert abs(math.fsum(weights) - n) < 1e-12

    played = Scattered(
        _of(sync), _nothing, starts, seed=seed, batches=30, crashes=6, after=kept
    ).run()
    assert played.crashes == 0
    for state in played.servers:
        assert all(state["present"].values())
    models = torch.stack([sync.model(state) for state in played.servers])
    mean = total / n
    assert (models - mean).norm() < 0.3 * (torch.stack(starts) - mean).norm()


@pytest.mark.parametrize("sync", [ADPSGD(graph=Complete()), AsyncPushSum(graph=Complete())])
def test_the_keeper_of_one_that_is_gone_is_not_chosen(sync) -> None:
    clock = simulated(
        _of(sync),
        _pull,
        _start(),
        4,
        lr=0.01,
        compute=Constant(seconds=1.0),
        network=Uniform(latency_s=0.01, bytes_per_s=1e12),
        faults=[Crash(worker=1, at_s=5.5, detect_s=0.1)],
    )
    clock.play(5)
    while clock.clock.now_s < 6:
        assert clock.clock.step()
    before = clock.states[5]
    assert all(
        state["present"] == {"0": True, "1": False, "2": True, "3": True}
        for state in clock.states[4:]
    )
    clock.play(30)
    after = clock.states[5]
    assert before["version"] == after["version"]
    assert torch.equal(before["params"], after["params"])
    alive = [clock.states[rank] for rank in (4, 6, 7)]
    assert min(state["step"] for state in alive) >= 35
    mean = sum(state["params"] for state in alive) / sum(s.get("weight", 1.0) for s in alive)
    _close(sync.whole(clock.states[4:]), mean)


# Runs -----------------------------------------------------------------------------------------


@each_member
def test_workers_that_crash_and_come_back_are_not_in_the_way(sync) -> None:
    """Eight workers with random crashes train to the end, and the same each time."""

    def played(seed: int) -> tuple[list[int], torch.Tensor]:
        came: list[int] = []
        clock = simulated(
            _of(sync),
            lambda rank, batch, w: w - math.sin(rank + batch),
            _start(),
            8,
            lr=0.05,
            compute=LogNormal(spread=0.5),
            network=Uniform(latency_s=0.1, bytes_per_s=1e4, loss=0.1, retry_s=0.5, jitter_s=0.2),
            faults=[RandomCrashes(every_s=30.0, back_after_s=4.0), Join(worker=3, at_s=7.0)],
            seed=seed,
            on_record=lambda _me, record, _now_s: came.append(record.seen.workers[0]),
        )
        clock.play(12)
        clock.drain()
        clock.play(24)
        return came, sync.whole(clock.states[8:], clock.states[:8])

    came, model = played(1)
    assert set(came) == set(range(8))
    assert model.norm() < 0.8 * _start().norm()
    again, same = played(1)
    assert came == again
    assert torch.equal(model, same)
    assert played(2)[0] != came


@each_member
@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_messages_and_crashes_holds_anyone_up(sync, seed: int) -> None:
    _goes_on(sync, seed)


@pytest.mark.long
@each_member
@pytest.mark.parametrize("thousand", range(2))
def test_no_order_of_thousands_holds_anyone_up(sync, thousand: int) -> None:
    for seed in range(1000 * thousand + 30, 1000 * (thousand + 1) + 30):
        _goes_on(sync, seed)


def _goes_on(sync, seed: int) -> None:
    """Somebody computes all its gradients; of partial reduce too few for a group may wait.

    One that crashes while its last is under way comes back behind it.
    """
    drawn = random.Random(seed)
    n = drawn.randint(1, 6)
    if isinstance(sync, PartialReduce) and (sync.group_size or 0) > n:
        sync = PartialReduce(group_size=max(n, 2))
    played = Scattered(
        _of(sync), _pull, _starts(n), seed=seed, batches=12, lr=0.01, crashes=drawn.randint(1, 9)
    ).run()
    steps = [state["step"] for state in played.states[:n]]
    assert not played.gone
    assert max(steps) >= 12
    assert not any(link for link in played.links.values())
    if isinstance(sync, PartialReduce):
        waiting = sum(state["awaits"] for state in played.states[:n])
        assert all(
            s >= 12 or state["awaits"] for s, state in zip(steps, played.states, strict=False)
        )
        assert waiting < (sync.group_size or n) + n - 1
    else:
        assert min(steps) >= 12


def test_those_who_come_when_nobody_has_a_model_left_begin_with_the_first() -> None:
    clock = simulated(
        _of(PartialReduce(group_size=2)),
        _nothing,
        _start(),
        2,
        compute=Constant(seconds=1.0),
        faults=[Crash(worker=0, at_s=2.5, back_s=9.0), Crash(worker=1, at_s=3.5, back_s=8.0)],
    )
    clock.play(12)
    _close(clock.algorithm.sync.whole(clock.states[2:], clock.states[:2]), _start())


def test_one_that_comes_back_begins_with_a_model_of_the_others() -> None:
    clock = simulated(
        _of(PartialReduce(group_size=2)),
        _nothing,
        _start(),
        3,
        states=None,
        compute=Constant(seconds=1.0),
        faults=[Crash(worker=2, at_s=2.5, back_s=9.5)],
    )
    for rank in range(3):
        clock.states[rank]["params"] = torch.full_like(_start(), 7.0)
    clock.play(4)
    assert clock.states[2]["new"]
    seven = torch.full_like(_start(), 7.0)
    _close(clock.algorithm.sync.whole(clock.states[3:], clock.states[:3]), seven)
    clock.play(12)
    assert not clock.states[2]["new"]
    _close(clock.states[2]["params"], seven)
