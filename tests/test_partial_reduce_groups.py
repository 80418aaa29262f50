"""Groups of partial reduce: the controller alone, in any order of arrivals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Now, Numbers, Received, Record, Recv, Send
from polyreme.algo.push import LEFT
from polyreme.algo.rule import SGD
from polyreme.algo.sync import PartialReduce
from polyreme.algo.sync.partial_reduce import _FORMED, _HAS, ready, waiting
from polyreme.algo.vector import Layout
from served import team

torch.set_num_threads(1)


class Controller:
    """The controller alone, told of what workers would tell it."""

    def __init__(self, sync: PartialReduce, n: int) -> None:
        self.sync, self.n = sync, n
        self.algorithm = DataParallel(rule=SGD(), sync=sync)
        self.me = team(self.algorithm, Layout.of({"w": (1,)}), n)[n]
        self.state = sync.init(self.algorithm, torch.zeros(1), self.me)
        self.groups: list[tuple[int, ...]] = []
        self.weights: list[list[float]] = []
        self.formed: list[tuple[int, int]] = []
        self.clock = [0] * n
        self.now_s = 0.0

    @property
    def waiting(self) -> set[int]:
        """Workers that wait for a group."""
        return set(waiting(self.state))

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
        """A round, and those in which members tell that they have the mean."""
        self._play(worker, message)
        while self.formed:
            each, group = self.formed.pop(0)
            self._play(each, ready(_HAS, group, 0.0, Numbers()))

    def _play(self, worker: int, message: Any) -> None:
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
                    said, group, _, clock, *weights = effect.message.packets[0].decode().tolist()
                    if said != _FORMED:
                        continue
                    self.formed.append((effect.to, int(group)))
                    members = {each for each, weight in enumerate(weights) if weight >= 0}
                    self.clock[effect.to] = int(clock)
                    told[effect.to] = weights
                    if told.keys() == members:
                        self.groups.append(tuple(sorted(members)))
                        self.weights.append([weights[each] for each in sorted(members)])
                        told = {}
                case Record():
                    pass


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


@pytest.mark.slice(1)
@pytest.mark.parametrize("thousand", range(10))
def test_no_order_of_ten_thousand_is_stuck(thousand: int) -> None:
    for seed in range(1000 * thousand, 1000 * (thousand + 1)):
        _never_stuck(seed)


def test_members_are_told_of_the_newest_clock() -> None:
    controller = Controller(PartialReduce(group_size=2, weights="dynamic"), 4)
    controller.comes(0, 1, 0, 1, 0, 2)  # 2 is two steps behind
    assert controller.groups == [(0, 1), (0, 1), (0, 2)]
    torch.testing.assert_close(controller.weights[-1], [0.8, 0.2])
    assert controller.clock == [3, 2, 3, 0]
