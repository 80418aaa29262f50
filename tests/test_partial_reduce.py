"""Partial reduce: what groups do to models, and that nobody is held up."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.sync import LocalSteps, PartialReduce
from polyreme.algo.topology import Gossip
from polyreme.sim.compute import Heterogeneous, LogNormal
from scattered import Scattered
from served import simulated
from workers import play

torch.set_num_threads(1)


def _gradient(rank: int, batch: int, w: torch.Tensor) -> torch.Tensor:
    i = torch.arange(w.numel(), dtype=w.dtype)
    return (1 + i % 3) * (w - (rank + 1) * torch.sin(i + rank + batch))


def _nothing(_rank: int, _batch: int, w: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(w)


def _start(n: int = 12) -> torch.Tensor:
    return torch.linspace(-1, 1, n, dtype=torch.float64)


def _starts(n: int) -> list[torch.Tensor]:
    return [_start() * (1 + worker) + worker for worker in range(n)]


def _of(sync, **more) -> DataParallel:
    return DataParallel(**{"rule": SGD(), "sync": sync, **more})


def _close(one: torch.Tensor, other: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


# What it is where it is simple -----------------------------------------------------------------


@pytest.mark.parametrize("rule", [SGD(momentum=0.9, weight_decay=0.01), AdamW()])
@pytest.mark.parametrize("sync", [PartialReduce(), PartialReduce(wait_s=0.1, weights="dynamic")])
def test_one_worker_takes_the_steps_of_the_rule(rule, sync) -> None:
    w = torch.nn.Parameter(_start())
    optimizer = (
        torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01)
        if isinstance(rule, SGD)
        else torch.optim.AdamW([w], lr=0.1, weight_decay=rule.weight_decay)
    )
    clock = simulated(_of(sync, rule=rule), _gradient, _start(), 1)
    for batch in range(9):
        w.grad = _gradient(0, batch, w.detach())
        optimizer.step()
        clock.play(batch + 1)
        _close(sync.whole(clock.states[1:], clock.states[:1]), w.detach())


def test_groups_of_all_are_local_steps_with_an_exchange_after_each() -> None:
    n, rule = 4, SGD(momentum=0.9, weight_decay=0.01)
    sync = PartialReduce(group_size=n)

    def lr(step: int) -> float:
        return 0.1 / (1 + step)

    theirs = play(_of(LocalSteps(every=1), rule=rule), _gradient, _start(), n, 8, lr=lr)
    clock = simulated(
        _of(sync, rule=rule), _gradient, _start(), n, lr=lr, compute=LogNormal(spread=1.0)
    )
    for step in range(1, 9):
        clock.play(step)
        ours = sync.whole(clock.states[n:], clock.states[:n])
        _close(ours, theirs.params[step, 0])


def test_constant_weights_leave_the_mean_of_all_models_where_it_is() -> None:
    starts = _starts(5)
    mean = torch.stack(starts).mean(0)
    algorithm = _of(PartialReduce(group_size=3))
    played = Scattered(algorithm, _nothing, starts, seed=1, batches=20).run()
    models = torch.stack([state["params"] for state in played.states[:5]])
    assert len(played.records) >= 50
    _close(models.mean(0), mean)
    assert (models - mean).norm() < 1e-3 * (torch.stack(starts) - mean).norm()


def test_weights_sum_to_one_and_fresh_members_weigh_more() -> None:
    drawn = random.Random(0)
    sync = PartialReduce(weights="dynamic", alpha=0.3)
    for _ in range(100):
        clocks = [drawn.randrange(9) for _ in range(drawn.randint(1, 6))]
        weights = sync.weighed(clocks)
        assert abs(sum(weights) - 1) < 1e-12
        by_age = sorted(zip(clocks, weights, strict=True))
        for (old, less), (new, more) in pairwise(by_age):
            assert abs(more * 0.7 ** (new - old) - less) < 1e-12
    constant = PartialReduce().weighed([1, 5, 9])
    assert constant == [1 / 3] * 3


def test_members_go_on_with_the_clock_of_the_newest() -> None:
    compute = Heterogeneous(seconds=1.0, slow_fraction=0.25, slow_factor=5.0)
    algorithm = _of(PartialReduce(group_size=2, weights="dynamic"))
    clock = simulated(algorithm, _gradient, _start(), 4, compute=compute)
    clock.play(24)
    slow = min(clock.states[:4], key=lambda state: state["step"])
    newest = max(state["clock"] for state in clock.states[:4])
    assert newest >= 24
    assert slow["clock"] > 2 * slow["step"]
    assert slow["clock"] > newest - 8


def test_slow_workers_hold_up_no_fast_ones() -> None:
    steps: list[int] = []
    for sync in (PartialReduce(group_size=2), PartialReduce(group_size=4)):
        compute = Heterogeneous(seconds=1.0, slow_fraction=0.25, slow_factor=5.0)
        clock = simulated(_of(sync), _gradient, _start(), 4, compute=compute)
        clock.play(24)
        steps.append(max(state["step"] for state in clock.states[:4]))
        steps.append(min(state["step"] for state in clock.states[:4]))
    fast, slow, all_fast, all_slow = steps
    assert fast > slow + 8
    assert all_fast == all_slow


# Runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_models_that_travel_in_any_order_do_not_hold_each_other_up(seed: int) -> None:
    drawn = random.Random(seed)
    n = drawn.randint(2, 6)
    sync = PartialReduce(group_size=drawn.randint(2, n), wait_s=drawn.choice([None, 1.0]))
    played = Scattered(_of(sync), _gradient, _starts(n), seed=seed, batches=10).run()
    steps = [state["step"] for state in played.states[:n]]
    waiting = [state["awaits"] for state in played.states[:n]]
    assert not played.under_way
    assert all(step == 10 or awaits for step, awaits in zip(steps, waiting, strict=True))
    assert max(steps) == 10
    assert sum(waiting) < (sync.group_size or n) + n - 1


def test_who_waits_when_it_is_drained_is_in_a_group_afterwards() -> None:
    algorithm = _of(PartialReduce(group_size=3, wait_s=1e6))
    first = simulated(algorithm, _gradient, _start(), 5, compute=LogNormal(spread=1.0))
    first.play(7)
    first.drain()
    held = [rank for rank, state in enumerate(first.states[:5]) if state["awaits"]]
    assert held
    assert held == [int(name) for name, came in first.states[5]["came"].items() if came]
    again = simulated(algorithm, _gradient, _start(), 5, states=first.states)
    again.play(12)
    before, after = first.states, again.states
    assert all(after[rank]["step"] > before[rank]["step"] for rank in range(5))


# What is refused -------------------------------------------------------------------------------


def test_what_is_of_gradients_that_travel_is_refused() -> None:
    for more, path in (
        ({"topology": Gossip()}, "topology"),
        ({"aggregate": MajorityVote()}, "aggregate"),
        ({"feedback": ErrorFeedback()}, "feedback"),
        ({"compress": TopK()}, "compress"),
    ):
        (found,) = _of(PartialReduce(), **more).check()
        assert found.path == f"data_parallel.{path}.kind"
    assert not _of(PartialReduce(), rule=AdamW()).check()


def test_groups_of_more_than_there_are_are_refused() -> None:
    (found,) = _of(PartialReduce(group_size=5)).refused(4)
    assert (found.path, found.legal) == ("data_parallel.sync.group_size", "2 to 4")
    assert not _of(PartialReduce(group_size=4)).refused(4)
    assert not _of(PartialReduce()).refused(1)
