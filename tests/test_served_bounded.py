"""Served syncs that bound how far workers are apart: what each worker's parameters contain."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import LARS, SGD, AdamW
from polyreme.algo.sync import R2SP, SSP, BackupWorkers, EveryStep
from polyreme.sim.compute import LogNormal
from served import Post, simulated
from workers import play

torch.set_num_threads(1)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(weight_decay=0.01), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


def _rate(step: int) -> float:
    return 0.1 / (1 + step)


@dataclass
class Marks:
    """Updates that each mark an entry of their own, (worker, clock): what parameters have seen."""

    n: int
    length: int
    seen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def gradient(self, rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        """Takes n off the entry of this update, of which the server takes the nth part."""
        self.seen[rank, batch] = w.reshape(self.n, self.length).round().bool()
        mark = torch.zeros(self.n, self.length, dtype=w.dtype)
        mark[rank, batch] = -self.n
        return mark.reshape(-1)

    def post(self, sync) -> Post:
        """Players that mark, at a rate of 1."""
        start = torch.zeros(self.n * self.length, dtype=torch.float64)
        return Post(DataParallel(rule=SGD(), sync=sync), self.gradient, start, self.n, lr=1.0)


# SSP ----------------------------------------------------------------------------------------------


def _bounded(seed: int) -> None:
    drawn = random.Random(seed)
    n, length, staleness = drawn.randint(1, 5), 10, drawn.randint(0, 4)
    marks = Marks(n, length)
    post = marks.post(SSP(staleness=staleness, servers=drawn.randint(1, 2)))
    speeds = [drawn.random() ** 3 + 1e-3 for _ in range(n)]
    clocks = [0] * n
    while (can := post.can()) and max(clocks) < length - 1:
        worker = drawn.choices(can, [speeds[rank] for rank in can])[0]
        clocks[worker] += 1
        post.arrive(worker)
    assert max(clocks) == length - 1, f"{seed}: nobody can go on, at clocks {clocks}"
    for (worker, clock), seen in marks.seen.items():
        assert seen[worker].tolist() == [at < clock for at in range(length)]
        for each in seen:  # none is missing before the bound, and none beyond what bounds allow
            there = int(each.sum())
            assert each[:there].all()
            assert clock - staleness <= there <= clock + staleness + 1, f"{seed}: {worker}, {clock}"
    assert max(clocks) - min(clocks) <= staleness + 1


@pytest.mark.slice(3)
@pytest.mark.parametrize("chunk", range(10))
def test_ssp_sees_all_before_the_bound(chunk: int) -> None:
    """A hundred schedules each, by what updates the parameters of each gradient contain."""
    for seed in range(100 * chunk, 100 * (chunk + 1)):
        _bounded(seed)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(9))
def test_ssp_sees_all_before_the_bound_in_many_schedules(chunk: int) -> None:
    for seed in range(1000 * (chunk + 1), 1000 * (chunk + 2)):
        _bounded(seed)


def test_ssp_lets_workers_run_ahead_to_the_bound_and_no_further() -> None:
    post = Marks(2, 12).post(SSP(staleness=3))
    post.order([0, 0, 0])
    assert post.can() == [0, 1]
    post.arrive(0)
    assert post.can() == [1]
    post.arrive(1)
    assert post.can() == [0, 1]


def _rounds(seed: int, n: int, length: int) -> list[int]:
    """Each round in an order of its own."""
    drawn = random.Random(seed)
    return [worker for _ in range(length) for worker in drawn.sample(range(n), n)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("servers", [1, 3])
def test_ssp_without_staleness_is_synchronous(seed: int, servers: int) -> None:
    algorithm = _of(SSP(staleness=0, servers=servers))
    post = Post(algorithm, _gradient, _start(), 4, lr=_rate).order(_rounds(seed, 4, 9))
    theirs = play(_of(EveryStep()), _gradient, _start(), 4, 9, lr=_rate)
    _close(post.params, theirs.params[-1, 0])


@pytest.mark.parametrize("rule", [SGD(momentum=0.9), AdamW(), LARS()])
@pytest.mark.parametrize("sync", [SSP(), SSP(staleness=0), BackupWorkers(backups=0), R2SP()])
def test_one_worker_does_as_one_that_meets_itself(sync, rule) -> None:
    post = Post(_of(sync, rule=rule), _gradient, _start(), 1, lr=_rate)
    theirs = play(_of(EveryStep(), rule=rule), _gradient, _start(), 1, 9, lr=_rate)
    for at in range(9):
        post.arrive(0)
        _close(post.params, theirs.params[at + 1, 0])


def test_rules_with_norms_see_whole_vectors_where_workers_step() -> None:
    wide = Post(_of(SSP(servers=3), rule=LARS()), _gradient, _start(), 2).order([0, 1] * 5)
    one = Post(_of(SSP(), rule=LARS()), _gradient, _start(), 2).order([0, 1] * 5)
    assert not _of(SSP(servers=3), rule=LARS()).check()
    assert torch.equal(wide.params, one.params)


def test_changes_may_be_compressed() -> None:
    order = _rounds(3, 3, 80)
    more = {"compress": TopK(ratio=0.25), "feedback": ErrorFeedback()}
    dense = Post(_of(SSP()), _gradient, _start(), 3, lr=0.02).order(order)
    packed = Post(_of(SSP(), **more), _gradient, _start(), 3, lr=0.02).order(order)
    assert sum(packed.nbytes[:3]) < sum(dense.nbytes[:3])
    assert (packed.params - dense.params).norm() < 0.1 * (_start() - dense.params).norm()


def test_what_was_not_sent_of_changes_is_of_the_rate_that_they_had() -> None:
    """Nothing is lost while the rate falls: what arrived and what is kept are all changes."""

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.arange(12).double() * (batch + 1) + rank)

    more = {"rule": SGD(), "compress": TopK(ratio=0.25), "feedback": ErrorFeedback()}
    post = Post(_of(SSP(), **more), gradient, _start(), 1, lr=_rate)
    for at in range(8):
        kept = post.states[0]["exchange"]["0"]["feedback"]["error"]
        post.arrive(0)
        changes = sum(_rate(batch) * gradient(0, batch, kept) for batch in range(at + 1))
        _close(post.params - kept, _start() - changes)
        assert kept.any()


# Backup workers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_no_backups_are_synchronous(seed: int) -> None:
    """Also where labels are not as many on all."""

    def weight(rank: int, batch: int) -> float:
        return 1.0 + (rank + batch) % 3

    more = {"rule": SGD(momentum=0.9, weight_decay=0.01)}
    algorithm = _of(BackupWorkers(backups=0), **more)
    post = Post(algorithm, _gradient, _start(), 4, lr=_rate, weight=weight)
    post.order(_rounds(seed, 4, 9))
    theirs = play(_of(EveryStep(), **more), _gradient, _start(), 4, 9, lr=_rate, weight=weight)
    _close(post.params, theirs.params[-1, 0])
    assert post.server["dropped"] == 0
    assert [record.step for record in post.records] == [1 + at // 4 for at in range(36)]


@pytest.mark.parametrize("seed", range(20))
def test_backups_drop_exactly_the_late_ones(seed: int) -> None:
    """Replayed by hand: the first n - b at the current parameters, in any order of arrival."""
    drawn = random.Random(seed)
    n, held = drawn.randint(2, 5), {}
    backups = drawn.randint(1, n - 1)

    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        held[rank] = w.clone(), _gradient(rank, batch, w)
        return held[rank][1]

    post = Post(
        DataParallel(rule=SGD(), sync=BackupWorkers(backups=backups)), gradient, _start(), n
    )
    w, taken, n_late = _start(), [], 0
    for at in range(60):
        worker = drawn.choice(post.can())
        base, found = held[worker]
        late = not torch.equal(base, w)
        taken += [] if late else [found]
        n_late += late
        post.arrive(worker)
        if len(taken) == n - backups:
            w, taken = w - 0.1 * sum(taken) / len(taken), []
            assert not any(post.server["waits"].values())
        record = post.records[at]
        assert (record.seen.weight, record.delays[0] > 0) == ((0.0, True) if late else (1.0, False))
        assert post.server["dropped"] == n_late
        _close(post.params, w)
        w = post.params
    assert n_late > 0


def test_a_step_is_made_of_what_counts_if_nothing_more_can_come() -> None:
    def gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
        return _gradient(rank, batch, w) * (float("nan") if (rank, batch) == (1, 0) else 1.0)

    post = Post(DataParallel(rule=SGD(), sync=BackupWorkers(backups=0)), gradient, _start(), 3)
    post.order([1, 2])
    assert post.can() == [0]
    post.arrive(0)
    mean = (_gradient(0, 0, _start()) + _gradient(2, 0, _start())) / 2
    _close(post.params, _start() - 0.1 * mean)
    assert post.can() == [0, 1, 2]


# R2SP ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_turns_are_kept_whatever_the_order_of_arrival(seed: int) -> None:
    """The parameters are those of one order, and so are all that workers are sent."""
    drawn = random.Random(seed)
    n = drawn.randint(2, 5)
    algorithm = _of(R2SP(), rule=SGD(momentum=0.5))
    post = Post(algorithm, _gradient, _start(), n)
    for _ in range(7 * n):
        post.arrive(drawn.choice(post.can()))
    straight = Post(algorithm, _gradient, _start(), n)
    straight.order([at % n for at in range(len(post.records))])
    assert [record.seen.workers for record in post.records] == [
        (at % n,) for at in range(len(post.records))
    ]
    assert torch.equal(post.params, straight.params)
    assert [record.delays[0] for record in post.records[n:]] == [n - 1] * (len(post.records) - n)
    assert len(post.records) > 5 * n


def test_turns_go_on_where_a_drained_run_left_them() -> None:
    algorithm = _of(R2SP())
    first = simulated(algorithm, _gradient, _start(), 4, compute=LogNormal(spread=1.0), seed=2)
    first.play(3)
    first.drain()
    records: list[tuple[int, ...]] = []
    other = simulated(
        algorithm,
        _gradient,
        _start(),
        4,
        states=first.states,
        on_record=lambda _me, record, _s: records.append(record.seen.workers),
    )
    turn = first.states[4]["turn"]
    other.play(9)
    assert records == [((turn + at) % 4,) for at in range(len(records))]
    assert len(records) >= 20
