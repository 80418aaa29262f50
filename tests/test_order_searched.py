"""Orders that a solver finds: as short as can be where that is known, and never over the cap."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, permutations, product

import pytest

from polyreme.plan.ir import Action
from polyreme.plan.order import ORDERS, searched
from polyreme.plan.order.kind import Ranks
from polyreme.plan.order.repetend import Block, Work
from polyreme.plan.order.searched import Searched, in_units, whole_backward
from polyreme.plan.order.window_solver import ended, shortest, whole
from polyreme.plan.play import Costs, Stuck, play

EFFORT = 0.1


def _drawn(seed: int, p: int, *, whole_numbers: bool = False) -> Costs:
    draw = random.Random(seed)

    def some() -> tuple[float, ...]:
        if whole_numbers:
            return tuple(float(draw.randint(2, 9)) for _ in range(p))
        return tuple(draw.uniform(0.2, 2.0) for _ in range(p))

    send = float(seed % 2) if whole_numbers else 0.1 * (seed % 2)
    return Costs(forward=some(), inputs=some(), weights=some(), send=send)


def _actions(blocks: list[list[Block]]) -> Ranks:
    return tuple(tuple(Action(kind=k, stage=s, microbatch=m) for k, s, m in own) for own in blocks)


def _busiest_s(costs: Costs) -> float:
    return max(map(sum, zip(costs.forward, costs.inputs, costs.weights, strict=True)))


@pytest.mark.parametrize("seed", range(8))
def test_a_microbatch_more_takes_the_busiest_rank_s_time_and_no_more(seed: int) -> None:
    p = 2 + seed % 4
    costs = _drawn(seed, p, whole_numbers=True)
    work = in_units(costs)
    least = shortest(work, p)
    assert least is not None
    assert least.period == max(work.busy)
    windows = ended(work, p, least.period, EFFORT)
    assert windows is not None
    took = [
        play(_actions(windows.ranks(p, m)), p, costs).makespan_s for m in range(3 * p, 3 * p + 4)
    ]
    assert [b - a for a, b in pairwise(took)] == [_busiest_s(costs)] * 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slice("5")
def test_it_is_never_longer_than_what_it_is_meant_to_replace(seed: int) -> None:
    for p, m in ((1, 2), (2, 4), (3, 2), (3, 7), (4, 8), (4, 13)):
        costs = _drawn(seed * 100 + p, p)
        found = play(ORDERS["searched"].actions(p, m, costs), p, costs)
        for name in ("1f1b", "zb-h1", "zb-auto"):
            other = play(ORDERS[name].actions(p, m, costs), p, costs).makespan_s
            assert found.makespan_s <= other * (1 + 1e-9), name
        assert max(found.peak(rank) for rank in range(p)) <= p


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slice(2)
def test_windows_alone_are_shorter_than_1f1b(seed: int) -> None:
    """Without the orders that are taken where they are shorter."""
    p, m = 4, 12
    costs = _drawn(seed, p)
    work = in_units(costs)
    least = shortest(work, p)
    windows = None if least is None else ended(work, p, least.period, EFFORT)
    assert windows is not None
    found = play(_actions(windows.ranks(p, m)), p, costs).makespan_s
    assert found < play(ORDERS["1f1b"].actions(p, m, costs), p, costs).makespan_s


def _own_orders(stage: int) -> Iterator[tuple[Action, ...]]:
    """All ways to play two microbatches on a rank."""
    lanes = [(kind, microbatch) for kind in "FIW" for microbatch in (0, 1)]
    for own in permutations(lanes):
        at = {lane: place for place, lane in enumerate(own)}
        if all(at["F", m] < at["I", m] < at["W", m] for m in (0, 1)):
            yield tuple(Action(stage=stage, kind=kind, microbatch=m) for kind, m in own)


@pytest.mark.parametrize(("seed", "cap"), [(0, 2), (1, 2), (2, 1), (3, 1)])
def test_few_microbatches_are_as_short_as_any_order(seed: int, cap: int) -> None:
    costs = _drawn(seed, 2, whole_numbers=True)
    best = float("inf")
    for ranks in product(_own_orders(0), _own_orders(1)):
        try:
            played = play(ranks, 2, costs)
        except Stuck:
            continue
        if max(played.peak(rank) for rank in (0, 1)) <= cap:
            best = min(best, played.makespan_s)
    blocks = whole(in_units(costs), 2, cap, 1.0)
    assert blocks is not None
    assert play(_actions(blocks), 2, costs).makespan_s == best


def test_a_smaller_cap_is_kept_and_costs_time() -> None:
    costs = Costs.equal(4)
    took = []
    for cap in (1, 2, 3, 4, 7):
        played = play(Searched(cap).actions(4, 16, costs), 4, costs)
        assert max(played.peak(rank) for rank in range(4)) <= cap
        took.append(played.makespan_s)
    assert took == sorted(took, reverse=True)
    assert took[0] == 16 * 9  # one microbatch after another: four stages down and up, and W
    assert took[-2:] == [3 * 16 + 3] * 2


def test_messages_that_leave_no_such_period_make_it_longer() -> None:
    """With one microbatch held a rank waits for its way down and back; W of it hides nothing."""
    work = Work(forward=(2, 2), inputs=(2, 2), weights=(1, 1), send=5)
    found = [shortest(work, cap) for cap in (1, 2, 4)]
    assert [each and each.period for each in found] == [2 + 5 + 2 + 2 + 5 + 2 + 1, 10, 5]


def test_the_same_costs_give_the_same_order_in_any_unit() -> None:
    costs = _drawn(5, 4)
    first = Searched().actions(4, 12, costs)
    searched._blocks.cache_clear()
    searched._windows.cache_clear()
    assert Searched().actions(4, 12, costs) == first
    scaled = Costs(
        forward=tuple(4 * each for each in costs.forward),
        inputs=tuple(4 * each for each in costs.inputs),
        weights=tuple(4 * each for each in costs.weights),
        send=4 * costs.send,
    )
    assert Searched().actions(4, 12, scaled) == first


@pytest.mark.parametrize(
    ("passes", "units"),
    [
        ((1.0, 1.0, 1.0), (1, 1, 1)),
        ((1.0, 1.5, 0.75), (4, 6, 3)),
        ((1e-3, 2e-3, 1e-3), (1, 2, 1)),
        ((1.0, 1.0, 0.0), (500, 500, 1)),
        ((0.0, 0.0, 0.0), (1, 1, 1)),
        ((2**0.5, 1.0, 1.0), (414, 293, 293)),
    ],
)
def test_costs_in_units(passes: tuple[float, ...], units: tuple[int, ...]) -> None:
    forward, inputs, weights = passes
    work = in_units(Costs.equal(3, forward=forward, inputs=inputs, weights=weights))
    assert (work.forward[0], work.inputs[0], work.weights[0]) == units


def test_stages_that_take_no_time_are_played() -> None:
    for inputs, weights in ((1.0, 0.0), (0.0, 0.0)):
        costs = Costs.equal(4, inputs=inputs, weights=weights)
        for m in (2, 4, 12):
            found = play(Searched().actions(4, m, costs), 4, costs)
            other = play(ORDERS["1f1b"].actions(4, m, costs), 4, costs).makespan_s
            assert found.makespan_s <= other


def test_halves_become_whole_only_where_nobody_waits_for_the_first() -> None:
    costs = Costs.equal(2)

    def rank(stage: int, text: str) -> tuple[Action, ...]:
        return tuple(
            Action(stage=stage, kind=word[0], microbatch=int(word[1])) for word in text.split()
        )

    ranks = (rank(0, "F0 F1 I0 W0 I1 W1"), rank(1, "F0 I0 W0 F1 I1 W1"))
    found = whole_backward(ranks, 2, costs)
    assert ["".join(each.kind for each in own) for own in found] == ["FFBB", "FIWFIW"]
    late = whole_backward((rank(0, "F0 F1 I0 W0 I1 W1"), rank(1, "F0 F1 I0 W0 I1 W1")), 2, costs)
    assert ["".join(each.kind for each in own) for own in late] == ["FFBB", "FFIWIW"]
    for seed in range(10):
        drawn = _drawn(seed, 3)
        halves = ORDERS["zb-auto"].actions(3, 6, drawn)
        before, after = play(halves, 3, drawn), play(whole_backward(halves, 3, drawn), 3, drawn)
        assert after.makespan_s == pytest.approx(before.makespan_s)
        assert [after.peak(n) for n in range(3)] == [before.peak(n) for n in range(3)]
