"""Orders of pipelines, played on a clock, against the closed forms of their papers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest

from polyreme.errors import ConfigError
from polyreme.plan.options import Parallel
from polyreme.plan.order import ORDERS, find
from polyreme.plan.order.by_list import ZBV, Chimera, DualPipe, ZBAuto
from polyreme.plan.order.dualpipe_v import DualPipeV
from polyreme.plan.order.gems import Gems
from polyreme.plan.order.gpipe import GPipe
from polyreme.plan.order.interleaved import Interleaved
from polyreme.plan.order.kind import Order, plan_order
from polyreme.plan.order.one_f_one_b import OneFOneB
from polyreme.plan.order.pipedream import PipeDream
from polyreme.plan.order.terapipe import TeraPipe, best_slices
from polyreme.plan.order.v_shape import VHalf, VMin
from polyreme.plan.order.zero_bubble import ZBH1, ZBH2
from polyreme.plan.play import Costs, Played, Stuck, key, play

SIZES = [(1, 1), (1, 4), (2, 4), (3, 6), (4, 8), (4, 12), (8, 16), (8, 32)]


def _played(order: Order, p: int, m: int, costs: Costs) -> Played:
    return play(order.actions(p, m, costs), p * order.chunks, costs)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("order", [GPipe(), OneFOneB()], ids=["gpipe", "1f1b"])
def test_without_halves_the_bubble_is_p_minus_1_passes_both_ways(
    order: Order, p: int, m: int
) -> None:
    costs = Costs.equal(p, forward=1.0, inputs=1.5, weights=0.75)
    found = _played(order, p, m, costs)
    assert found.makespan_s == pytest.approx((m + p - 1) * 3.25)
    for rank in range(p):
        assert found.bubble_s(rank) == pytest.approx((p - 1) * 3.25)
        assert found.peak(rank) == (m if isinstance(order, GPipe) else min(p - rank, m))


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_chunks_in_turn_divide_the_bubble(p: int, m: int, chunks: int) -> None:
    costs = Costs.equal(p * chunks, forward=1.0, inputs=1.0, weights=1.0)
    found = _played(Interleaved(chunks), p, m, costs)
    assert found.bubble_s(0) == pytest.approx((p - 1) * 3.0)  # of passes that are v times shorter
    assert found.peak(0) == min(p * chunks + p - 1, m * chunks)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_weight_halves_fill_the_bubble(p: int, m: int) -> None:
    costs = Costs.equal(p)
    one, two = _played(ZBH1(), p, m, costs), _played(ZBH2(), p, m, costs)
    assert one.makespan_s == 3 * m + (p - 1)
    assert max(one.peak(rank) for rank in range(p)) == p
    assert all(two.idle_s(rank) == 0 for rank in range(p))
    assert max(two.peak(rank) for rank in range(p)) == 2 * p - 1


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16), (8, 32)])
def test_two_directions_have_chimeras_bubble(p: int, m: int) -> None:
    costs = Costs.equal(p, forward=1.0, inputs=0.5, weights=0.5)
    found = _played(Chimera(), p, m, costs)
    assert found.bubble_s(0) / found.makespan_s == pytest.approx((p - 2) / (2 * m + p - 2))
    assert p / 2 + 1 <= max(found.peak(rank) for rank in range(p)) <= p


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 8), (4, 12), (6, 20), (7, 14), (8, 32)])
@pytest.mark.slice("2-4", "3-6", "4-8")
def test_orders_stay_within_the_bubble_and_memory_of_their_papers(p: int, m: int) -> None:
    of_1f1b = 3 * (p - 1)
    bounds = (  # in chunks, of which a rank of 1F1B has two where these have
        (ZBAuto(), of_1f1b / 3, p),
        (ZBV(), p - 1, 2 * p),
        (VHalf(), 2 * of_1f1b / 2, (p + 2) // 2 * 2),
        (VMin(), 2 * of_1f1b * 2 / 3, (p + 4) // 3 * 2),
        (DualPipe(), max((p / 2 - 1) * 2, 0), p + 1),
        (DualPipeV(), (p - 1) * 2, 2 * p + 1),
    )
    for order, bubble, peak in bounds:
        if order.refused(p, m):
            continue
        found = _played(order, p, m, Costs.equal(p * order.chunks))
        assert found.bubble_s(0) <= bubble, order.name
        assert max(found.peak(rank) for rank in range(p)) <= peak, order.name


def test_a_circle_is_stuck_and_says_who_waits_for_what() -> None:
    costs = Costs.equal(2)
    first, last = GPipe().actions(2, 2, costs)  # F0 F1 B0 B1 each
    with pytest.raises(Stuck, match="rank 0: B0 of stage 0 waits for B0 of stage 1") as found:
        play([(first[0], first[2], first[1], first[3]), last], 2, costs)
    assert set(found.value.waits) == {0, 1}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_stages_that_are_unlike_are_played_once_each(order: Order) -> None:
    draw = random.Random(order.name)
    for p, m in ((2, 4), (3, 4), (4, 6)):
        if order.refused(p, m):
            continue
        n = p * order.chunks

        def some(n: int = n) -> tuple[float, ...]:
            return tuple(draw.uniform(0.2, 2.0) for _ in range(n))

        costs = Costs(forward=some(), inputs=some(), weights=some(), send=0.1)
        ranks = order.actions(p, m, costs)
        play(ranks, n, costs)
        forward = [a for rank in ranks for a in rank if a.kind == "F"]
        slices = order.slices
        assert len(forward) == len(set(map(key, forward))) == n * m * slices
        for rank, actions in enumerate(ranks):
            assert all(order.rank(a.stage, p, a.copy) == rank for a in actions)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_found_and_says_where_its_stages_lie(name: str) -> None:
    order = find(name)
    assert (order.name, bool(order.line and order.source and order.bubble and order.peak)) == (
        name,
        True,
    )
    p, m = 4, 8
    placements = order.placements(p)
    assert len(placements) == p * order.chunks
    costs = Costs.equal(p * order.chunks)
    held = [{(a.stage, a.copy) for a in own} for own in plan_order(order, p, m, costs)]
    for stage, ranks in enumerate(placements):
        assert len(set(ranks)) == order.copies
        for copy, rank in enumerate(ranks):
            assert (stage, copy) in held[rank]
    assert sum(map(len, held)) == p * order.chunks * order.copies


def test_an_order_that_is_none_lists_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r'parallel.order: "zb-h3" is no order. Legal: zb-h[12]'):
        find("zb-h3")
    (fault,) = Parallel(order="zb-h3", pp=2).check()
    assert fault.legal.startswith('"zb-h')
    (fault,) = Parallel(order="zb-h3").check()
    assert fault.legal.startswith('leave it out (or, with parallel.pp > 1, "zb-h')


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.slice(5)
def test_closed_forms_are_what_is_played(name: str) -> None:
    order = ORDERS[name]
    for p, m in ((1, 2), (2, 4), (3, 6), (4, 4), (4, 8), (5, 10), (6, 18)):
        if order.refused(p, m):
            continue
        n = p * order.chunks
        for forward, inputs, weights in ((1, 1, 1), (1, 1.5, 0.5), (2, 1, 1), (0.5, 1.5, 0.25)):
            costs = Costs.equal(n, forward=forward, inputs=inputs, weights=weights)
            found = play(order.actions(p, m, costs), n, costs)
            form_s = order.closed_form_s(p, m, costs)
            assert form_s is None or form_s == pytest.approx(found.makespan_s), (p, m, costs)
            flights = [order.in_flight(stage, p, m) for stage in range(n)]
            assert flights in ([None] * n, _flights(found, n)), (p, m)


def _flights(found: Played, n_stages: int) -> list[int]:
    """The most microbatches forward and not yet backward, stage by stage."""
    held, most = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for span in (span for spans in found.spans for span in spans):
        action = span.action
        lane = (action.stage, action.copy)
        held[lane] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * (action.token_slice == 0)
        most[lane] = max(most[lane], held[lane])
    return [most[stage, 0] + most[stage, 1] for stage in range(n_stages)]


@pytest.mark.parametrize("seed", range(40))
def test_token_slices_are_the_best_of_all_ways_to_cut(seed: int) -> None:
    draw = random.Random(seed)
    n_tokens, p, multiple = draw.randint(1, 40), draw.randint(1, 6), draw.choice((1, 2, 4, 8))
    n_tokens = min(n_tokens, 11 * multiple)
    start_s, per_token_s, per_pair_s = (draw.uniform(0, scale) for scale in (8.0, 1.0, 0.1))

    def latency_s(tokens: int, context: int) -> float:
        return start_s + per_token_s * tokens + per_pair_s * tokens * context

    def total_s(slices: Sequence[int]) -> float:
        starts = [sum(slices[:number]) for number in range(len(slices))]
        all_s = [latency_s(*each) for each in zip(slices, starts, strict=True)]
        return sum(all_s) + (p - 1) * max(all_s)

    found = best_slices(latency_s, n_tokens, p, multiple=multiple)
    assert sum(found) == n_tokens
    assert all(each % multiple == 0 for each in found[:-1])
    assert len(found) == 1 or found[-1] >= multiple
    n, rest = max(n_tokens // multiple, 1), n_tokens % multiple if n_tokens >= multiple else 0
    unit = multiple if n_tokens >= multiple else n_tokens
    ways = [
        [unit * (end - start) + rest * (end == n) for start, end in pairwise((0, *cuts, n))]
        for k in range(n)
        for cuts in combinations(range(1, n), k)
    ]
    assert total_s(found) == pytest.approx(min(map(total_s, ways)))


def test_slices_that_differ_take_what_the_form_says() -> None:
    slices = (0.4, 0.25, 0.2, 0.15)
    for p, m in ((1, 1), (4, 1), (4, 3)):
        costs = Costs(
            forward=(1.0,) * p, inputs=(1.5,) * p, weights=(0.5,) * p, slices=slices, send=0.01
        )
        order = TeraPipe(len(slices))
        found = play(order.actions(p, m, costs), p, costs)
        assert found.makespan_s == pytest.approx(order.closed_form_s(p, m, costs))
        assert found.makespan_s == pytest.approx(3 * m + (p - 1) * (3 * 0.4 + 2 * 0.01))


def test_pipedream_reads_the_newest_weights_and_keeps_those_on_the_way() -> None:
    p, m = 4, 9
    for rank, own in enumerate(PipeDream().actions(p, m, Costs.equal(p))):
        made, most = 0, 0
        read: dict[int, int] = {}  # versions by microbatch on the way
        for action in own:
            if action.kind == "F":
                assert action.weight_version == made
                read[action.microbatch] = made
            elif action.kind == "B":
                assert action.weight_version == read.pop(action.microbatch)
            else:
                made += 1
                assert action.weight_version == made
            most = max(most, len({made, *read.values()}))
        assert made == m
        assert most == PipeDream().weights(rank, p) == p - rank


def test_gems_holds_one_microbatch() -> None:
    for p, m in ((2, 4), (4, 8), (8, 11)):
        costs = Costs.equal(p)
        found = play(Gems().actions(p, m, costs), p, costs)
        assert all(found.peak(rank) == 1 for rank in range(p))
        more = play(Gems().actions(p, m + 1, costs), p, costs).makespan_s - found.makespan_s
        assert 1 - 3 / more == pytest.approx((p - 1) / (p + 1 / 2))  # of a microbatch's turn


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("m", [1, 7, 24])
@pytest.mark.parametrize("send", [0.1, 3.0])
def test_the_closed_form_of_1f1b_knows_its_sends(p, m, send):
    """Long steps are ranked by it: stages that many sends lie between must not look as good."""
    order, costs = (
        ORDERS["1f1b"],
        Costs(forward=(1.0,) * p, inputs=(1.0,) * p, weights=(1.0,) * p, send=send),
    )
    played_s = play(order.actions(p, m, costs), p, costs).makespan_s
    form_s = order.closed_form_s(p, m, costs)
    assert played_s <= form_s * (1 + 1e-12)
    assert form_s < played_s + 2 * send + 1e-9
