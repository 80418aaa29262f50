"""Served syncs whose workers wait for others: nobody waits for one that is gone."""

from __future__ import annotations

import random

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.rule import SGD
from polyreme.algo.sync import R2SP, SSP, AsyncADMM, BackupWorkers, Downpour
from served import Post

torch.set_num_threads(1)
each_kind = pytest.mark.parametrize("kind", [SSP, BackupWorkers, R2SP, AsyncADMM, Downpour])


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    return w - (rank + 1) * torch.sin(torch.arange(w.numel(), dtype=w.dtype) + rank + batch)


def _post(sync, n: int) -> Post:
    start = torch.zeros(3, dtype=torch.float64)
    return Post(DataParallel(rule=SGD(), sync=sync), _gradient, start, n, lr=0.01)


def _drawn(kind: type, drawn: random.Random, n: int):
    count = drawn.randint
    if kind is SSP:
        return SSP(staleness=count(0, 3), servers=count(1, 2))
    if kind is BackupWorkers:
        return BackupWorkers(backups=count(0, n - 1))
    if kind is AsyncADMM:
        return AsyncADMM(barrier=count(1, n + 1), delay=count(1, 4), local_steps=1)
    if kind is Downpour:
        return Downpour(push_every=1, fetch_every=count(1, 3))
    return kind()


@each_kind
def test_somebody_can_always_go_on(kind: type) -> None:
    """Schedules in which workers push, leave and come back as they like."""
    _goes_on(kind, range(25))


@pytest.mark.long
@each_kind
@pytest.mark.parametrize("chunk", range(10))
def test_somebody_can_always_go_on_in_many_schedules(kind: type, chunk: int) -> None:
    _goes_on(kind, range(200 * chunk + 25, 200 * (chunk + 1) + 25))


def _goes_on(kind: type, seeds: range) -> None:
    for seed in seeds:
        drawn = random.Random(seed)
        n = drawn.randint(1, 5)
        post = _post(_drawn(kind, drawn, n), n)
        for _ in range(40):
            dice, here = drawn.random(), [rank for rank in range(n) if rank not in post.gone]
            if here and dice < 0.1:
                post.leave(drawn.choice(here))
            elif post.gone and dice < 0.3:
                post.come(drawn.choice(sorted(post.gone)))
            elif here:
                assert post.can(), f"{seed}: all wait of {here}"
                post.arrive(drawn.choice(post.can()))
        for rank in sorted(post.gone):
            post.come(rank)
        queue, told = list(range(n)), len(post.records)
        for _ in range(8 * n):  # all push again, who waited longest first
            assert post.can(), f"{seed}: all wait once all are back"
            worker = next(rank for rank in queue if rank in post.can())
            queue = [*(rank for rank in queue if rank != worker), worker]
            post.arrive(worker)
        pushed = {record.seen.workers[0] for record in post.records[told:]}
        assert pushed == set(range(n)), f"{seed}: only {pushed} go on"
        assert all(torch.isfinite(state["params"]).all() for state in post.states)


def test_the_slowest_that_leaves_lets_the_others_go_on() -> None:
    post = _post(SSP(staleness=1), 3).order([0, 0, 1, 1])
    assert post.can() == [2]
    post.leave(2)
    assert post.can() == [0, 1]


def test_one_that_comes_back_is_at_the_clock_of_the_slowest() -> None:
    post = _post(SSP(staleness=1), 3)
    post.leave(2)
    post.order([0, 1] * 5)
    post.come(2)
    post.arrive(2)
    assert post.server["clocks"] == {"0": 5, "1": 5, "2": 5}
    assert torch.equal(post.states[2]["params"], post.params)
    post.order([0, 0])
    assert post.can() == [1, 2]


def test_the_last_that_leaves_closes_the_step_of_those_that_wait() -> None:
    post = _post(BackupWorkers(backups=0), 3).order([0, 1])
    assert post.can() == [2]
    post.leave(2)
    assert (post.can(), post.server["version"]) == ([0, 1], 1)


def test_the_turn_of_one_that_is_gone_is_passed_over() -> None:
    post = _post(R2SP(), 3).order([0, 2])
    assert post.can() == [0, 1]
    post.leave(1)
    assert post.can() == [0, 2]
    post.order([2, 0])
    assert [record.seen.workers[0] for record in post.records] == [0, 2, 0, 2]
    post.come(1)
    post.order([1, 2, 0, 1])
    assert [record.seen.workers[0] for record in post.records[4:]] == [0, 1, 2]


def test_what_waits_for_its_turn_goes_with_its_worker() -> None:
    post = _post(R2SP(), 2).order([1])
    before = post.params
    post.leave(1)
    assert post.can() == [0]
    post.arrive(0)
    assert torch.equal(post.params, before - 0.01 * _gradient(0, 0, before))
    assert post.can() == [0]


def test_a_barrier_is_as_wide_as_there_are_workers() -> None:
    post = _post(AsyncADMM(barrier=3, delay=1, local_steps=1), 3).order([0, 1])
    assert post.can() == [2]
    post.leave(2)
    assert post.can() == [0, 1]
    post.order([1, 0])
    assert post.can() == [0, 1]
