"""Partial reduce: groups, what they do to models, and that they always come about."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from polyreme.algo.aggregate import MajorityVote
from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import TopK
from polyreme.algo.effects import Now, Numbers, Received, Record, Recv, Send
from polyreme.algo.feedback import ErrorFeedback
from polyreme.algo.push import LEFT
from polyreme.algo.rule import SGD, AdamW
from polyreme.algo.sync import LocalSteps, PartialReduce
from polyreme.algo.sync.partial_reduce import ready
from polyreme.algo.topology import Gossip
from polyreme.algo.vector import Layout
from polyreme.sim.compute import Heterogeneous, LogNormal
from scattered import Scattered
from served import simulated, team
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


class Controller:
    """The controller alone, told of what workers would tell it."""

    def __init__(self, sync: PartialReduce, n: int) -> None:
        self.sync, self.n = sync, n
        self.algorithm = _of(sync)
        self.me = team(self.algorithm, Layout.of({"w": (1,)}), n)[n]
        self.state = sync.init(self.algorithm, torch.zeros(1), self.me)
        self.groups: list[tuple[int, ...]] = []
        self.weights: list[list[float]] = []
        self.clock = [0] * n
        self.now_s = 0.0

    @property
    def waiting(self) -> set[int]:
        """Workers that wait for a group."""
        return {int(name) for name, came in self.state["came"].items() if came}

    def comes(self, *workers: int) -> list[tuple[int, ...]]:
        """Workers have done a step; the groups that are closed by it."""
        before = len(self.groups)
        for worker in workers:
            self.clock[worker] += 1
            self._round(worker, ready(0, self.clock[worker], 0.1, Numbers(weight=1.0)))
        return self.groups[before:]

    def leaves(self, worker: int) -> list[tuple[int, ...]]:
        """A worker is gone; the groups that are closed by it."""
        before = len(self.groups)
        self._round(worker, ready(LEFT, 0, 0.0, Numbers()))
        return self.groups[before:]

    def waits(self) -> list[tuple[int, ...]]:
        """The time that is set is over; the groups that are closed by it."""
        before, self.now_s = len(self.groups), self.now_s + self.state["left_s"]
        self._round(0, None)
        return self.groups[before:]

    def _round(self, worker: int, message: Any) -> None:
        program = self.sync.round(self.algorithm, self.state, self.me)
        told: dict[int, list[float]] = {}
        answer: Any = None
        while True:
            try:
                effect = program.send(answer)
            except StopIteration as end:
                self.state = end.value
                assert not told, "all members of a group are told of it"
                return
            answer = None
            match effect:
                case Recv():
                    timed = self.state["left_s"] >= 0
                    assert (effect.timeout_s is not None) == timed
                    answer = message and Received(source=worker, message=message)
                case Now():
                    answer = self.now_s
                case Send():
                    _, clock, *weights = effect.message.packets[0].decode().tolist()
                    members = {each for each, weight in enumerate(weights) if weight >= 0}
                    self.clock[effect.to] = int(clock)
                    told[effect.to] = weights
                    if told.keys() == members:
                        self.groups.append(tuple(sorted(members)))
                        self.weights.append([weights[each] for each in sorted(members)])
                        told = {}
                case Record():
                    pass


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
    controller = Controller(PartialReduce(group_size=2, weights="dynamic"), 4)
    controller.comes(0, 1, 0, 1, 0, 2)  # 2 is two steps behind
    assert controller.groups == [(0, 1), (0, 1), (0, 2)]
    torch.testing.assert_close(controller.weights[-1], [0.8, 0.2])
    assert controller.clock == [3, 2, 3, 0]
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


# Groups ----------------------------------------------------------------------------------------


def test_a_group_is_closed_at_its_size_in_order_of_arrival() -> None:
    controller = Controller(PartialReduce(group_size=3), 6)
    assert controller.comes(5, 0) == []
    assert controller.comes(2) == [(0, 2, 5)]
    assert controller.comes(1, 4, 3) == [(1, 3, 4)]


def test_a_group_is_closed_when_its_time_is_over() -> None:
    controller = Controller(PartialReduce(wait_s=2.0), 4)
    assert controller.comes(3) == []
    controller.now_s = 0.5
    assert controller.comes(1) == []
    assert controller.state["left_s"] == 1.5
    assert controller.waits() == [(1, 3)]
    assert controller.state["left_s"] < 0
    assert controller.comes(0, 1, 2, 3) == [(0, 1, 2, 3)]  # nobody is left to come


def test_what_comes_first_of_size_and_time_closes_a_group() -> None:
    controller = Controller(PartialReduce(group_size=2, wait_s=2.0), 4)
    assert controller.comes(3, 1) == [(1, 3)]
    assert controller.comes(0) == []
    assert controller.waits() == [(0,)]


def test_the_first_groups_are_of_all() -> None:
    controller = Controller(PartialReduce(group_size=2, wait_s=1.0, warmup=2), 4)
    assert controller.comes(0, 1) == []
    assert controller.waits() == []
    assert controller.comes(2, 3) == [(0, 1, 2, 3)]
    assert controller.comes(3, 2, 1, 0) == [(0, 1, 2, 3)]
    assert controller.comes(3, 2) == [(2, 3)]


def test_cliques_are_held_until_one_of_another_comes() -> None:
    controller = Controller(PartialReduce(group_size=2, filter_period=3), 4)
    assert controller.comes(0, 1, 0, 1, 2, 3) == [(0, 1), (0, 1), (2, 3)]
    assert controller.comes(0, 1) == []
    assert controller.waiting == {0, 1}
    assert controller.comes(2) == [(0, 2)]
    assert controller.waiting == {1}
    assert controller.state["groups"] == 0  # all are connected: a new period
    assert controller.comes(0) == [(0, 1)]


def test_those_who_were_held_are_taken_in_order_and_the_rest_waits_anew() -> None:
    controller = Controller(PartialReduce(group_size=2, wait_s=2.0, filter_period=1), 4)
    assert controller.comes(0, 1) == [(0, 1)]
    controller.comes(1)
    controller.now_s = 1.5
    assert controller.comes(0) == []
    assert controller.state["left_s"] == 0.5
    assert controller.comes(2) == [(1, 2)]
    assert controller.waiting == {0}
    assert controller.state["left_s"] == 2.0


def test_a_clock_that_starts_anew_makes_no_wait_longer() -> None:
    controller = Controller(PartialReduce(wait_s=2.0), 4)
    controller.now_s = 100.0
    controller.comes(0)
    controller.now_s = 0.0
    controller.comes(1)
    assert controller.state["left_s"] == 2.0


def test_time_that_is_over_does_not_let_a_clique_pass() -> None:
    controller = Controller(PartialReduce(wait_s=1.0, filter_period=1), 4)
    controller.comes(0, 1)
    assert controller.waits() == [(0, 1)]
    controller.comes(0, 1)
    assert controller.waits() == []
    assert controller.comes(3) == [(0, 1, 3)]


@pytest.mark.parametrize("period", [1, 3, None])
def test_groups_connect_all_workers_within_a_period(period: int | None) -> None:
    """Arrivals in fixed pairs, which fall apart unless they are held, and random ones."""
    for seed in range(40):
        drawn = random.Random(seed)
        n = drawn.choice([4, 6, 8])
        controller = Controller(PartialReduce(group_size=2, filter_period=period), n)
        while len(controller.groups) < 60:
            first = drawn.randrange(0, n, 2)
            free = set(range(n)) - controller.waiting
            paired = [each for each in (first, first + 1) if each in free]
            controller.comes(*(paired if drawn.random() < 0.9 else drawn.sample(sorted(free), 1)))
        part, length = list(range(n)), 0
        for group in controller.groups:
            labels = {part[each] for each in group}
            part = [min(labels) if each in labels else each for each in part]
            length += 1
            if len(set(part)) == 1:
                part, length = list(range(n)), 0
            assert length <= (period or n) + n - 2


def test_of_fewer_than_a_group_those_who_are_left_are_one() -> None:
    controller = Controller(PartialReduce(group_size=3), 4)
    assert controller.comes(0, 1) == []
    assert controller.leaves(2) == []
    assert controller.leaves(3) == [(0, 1)]
    assert controller.leaves(0) == []
    assert controller.comes(1) == [(1,)]


def test_who_is_gone_is_no_part_to_wait_for() -> None:
    controller = Controller(PartialReduce(group_size=2, filter_period=1), 4)
    assert controller.comes(0, 1, 0, 1) == [(0, 1)]
    assert controller.leaves(2) == []
    assert controller.leaves(3) == [(0, 1)]


def _never_stuck(seed: int) -> None:
    """Workers come in any order, and go after some steps: each step's group comes about."""
    drawn = random.Random(seed)
    n = drawn.randint(1, 7)
    size, wait_s = drawn.choice([None, *range(2, max(n, 2) + 1)]), drawn.choice([None, None, 1.0])
    sync = PartialReduce(
        group_size=size,
        wait_s=wait_s,
        filter_period=drawn.choice([None, 1, 2, 5]),
        warmup=drawn.choice([0, 0, 2]),
    )
    controller = Controller(sync, n)
    left = [drawn.randint(0, 6) for _ in range(n)]
    there = set(range(n))
    n_steps = sum(left)
    while there:
        moves = sorted(there - controller.waiting)
        timed = controller.state["left_s"] >= 0
        assert moves or timed, f"stuck: seed {seed}, {controller.state}"
        if timed and (not moves or drawn.random() < 0.3):
            controller.waits()
            continue
        worker = drawn.choice(moves)
        if left[worker]:
            left[worker] -= 1
            controller.comes(worker)
        else:
            there.remove(worker)
            controller.leaves(worker)
    assert sum(map(len, controller.groups)) == n_steps
    assert wait_s is None or controller.state["left_s"] < 0


@pytest.mark.parametrize("thousand", range(10))
def test_no_order_of_ten_thousand_is_stuck(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        _never_stuck(seed)


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
