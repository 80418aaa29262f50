"""Makespan, bubble and peak that papers and `polyreme list orders` state, over grids of p and m."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import msgspec
import pytest

from polyreme.plan.order import ORDERS
from polyreme.plan.order.interleaved import Interleaved
from polyreme.plan.order.kind import Order
from polyreme.plan.play import Costs, Played, play

Passes = tuple[float, float, float]  # F, I, W of a stage
COSTS: tuple[Passes, ...] = ((1, 1, 1), (2, 3, 1), (2, 1.5, 0.5), (1, 0.5, 0.5))
EQUAL: tuple[Passes, ...] = ((1, 1, 1), (0.25, 0.25, 0.25))
GRID = [(p, m) for p in range(1, 9) for m in sorted({1, 2, p, p + 1, 2 * p, 3 * p})]


def _played(order: Order, p: int, m: int, passes: Passes) -> Played:
    forward, inputs, weights = passes
    n = p * order.chunks
    costs = Costs(
        forward=(forward,) * n,
        inputs=(inputs,) * n,
        weights=(weights,) * n,
        slices=(1 / order.slices,) * order.slices if order.slices > 1 else (),
    )
    return play(order.actions(p, m, costs), n, costs)


def _most(ranks: Callable[[int], float], p: int) -> float:
    return max(ranks(rank) for rank in range(p))


def _value(form: str, p: int, m: int, passes: Passes, rank: int = 0) -> float:
    """Of a form in p, m, rank, F, I, W and B."""
    forward, inputs, weights = passes
    names = {"p": p, "m": m, "rank": rank, "F": forward, "I": inputs, "W": weights}
    return float(eval(form, {"min": min, "max": max}, names | {"B": inputs + weights}))


class Form(msgspec.Struct, frozen=True):
    """Seconds of the bubble and chunks held at the peak, and where that is stated."""

    bubble: str
    peak: str
    where: str = "True"
    costs: tuple[Passes, ...] = COSTS


# On every rank, stages alike, no sends. Passes of a chunk are v times shorter than those of a rank.
EXACT: dict[str, tuple[Order, Form]] = {
    "gpipe": (ORDERS["gpipe"], Form("(p-1)*(F+B)", "m")),
    "1f1b": (ORDERS["1f1b"], Form("(p-1)*(F+B)", "min(p-rank, m)")),
    "zb-h1": (ORDERS["zb-h1"], Form("(p-1)*(F+I-W)", "p", "m >= p")),
    **{
        f"interleaved {v}": (
            Interleaved(v),
            Form("(p-1)*(F+B)", f"min(2*(p-1-rank) + ({v}-1)*p + 1, m*{v})", "m % p == 0"),
        )
        for v in (1, 2, 3)
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_closed_forms_hold_for_makespan_bubble_and_peak_of_every_rank(name: str) -> None:
    order, form = EXACT[name]
    grid = [(p, m) for p, m in GRID if _value(form.where, p, m, (1, 1, 1))]
    assert len(grid) > 15
    for (p, m), passes in product(grid, form.costs):
        found = _played(order, p, m, passes)
        bubble_s = pytest.approx(_value(form.bubble, p, m, passes))
        busy_s = m * order.chunks * sum(passes)
        assert found.makespan_s - busy_s == bubble_s, (p, m, passes)
        assert _most(found.idle_s, p) == bubble_s, (p, m, passes)
        for rank in range(p):
            assert found.bubble_s(rank) == bubble_s, (p, m, passes)
            assert found.peak(rank) == _value(form.peak, p, m, passes, rank), (p, m, rank)


def test_whole_ranks_are_interleaved_in_a_closed_form_of_microbatches() -> None:
    for p in range(2, 9):
        for v in (2, 3, 4):
            found = _played(Interleaved(v), p, 3 * p, (1, 1, 1))
            assert found.peak(0) / v == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_makespans_are_those_of_an_independent_player() -> None:
    """F = I = W = 1; numbers of another implementation."""
    wanted = {
        (4, 8): {"gpipe": 33, "1f1b": 33, "zb-h1": 27, "zb-auto": 27, "searched": 27},
        (8, 16): {"gpipe": 69, "1f1b": 69, "zb-h1": 55, "zb-auto": 55, "searched": 55},
    }
    for (p, m), of in wanted.items():
        found = {name: _played(ORDERS[name], p, m, (1, 1, 1)).makespan_s for name in of}
        assert found == of


# At most: idle time of a rank between its first and last pass, and the peak, in chunks.
BOUNDS = {
    "zb-h2": Form("max((p-1)*(F+I-2*W), 0)", "2*p - 1"),
    "zb-auto": Form("(p-1)*(F+I-W)", "p"),
    "searched": Form("(p-1)*(F+I-W)", "p"),
    "zb-v": Form("(p-1)*F", "2*p", costs=EQUAL),
    "v-half": Form("2*(p-1)*(F+B)/2", "(p+2)//2*2", costs=EQUAL),
    "v-min": Form("2*(p-1)*(F+B)*2/3", "(p+4)//3*2", costs=EQUAL),
    "dualpipe": Form("(p/2-1)*((F+B) + B - 3*W)", "p + 1"),
    "dualpipe-v": Form("(p-1)*((F+B) + B - 3*W)", "2*p + 1"),
    "terapipe": Form("(p-1)*(F+B)/4", "4*m"),
    "pipedream": Form("(p-1)*(F+B)", "p"),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.slice("zb-h2", "zb-auto", "v-min", "terapipe", "pipedream")
def test_bubble_and_peak_stay_within_what_the_list_states(name: str) -> None:
    order, form = ORDERS[name], BOUNDS[name]
    grid = [(p, m) for p in range(2, 7) for m in (2 * p, 3 * p + p % 2) if not order.refused(p, m)]
    assert grid
    for (p, m), passes in product(grid, form.costs):
        found = _played(order, p, m, passes)
        most_s = _value(form.bubble, p, m, passes) + 1e-9
        assert _most(found.idle_s, p) <= most_s, (p, m, passes)
        assert _most(found.peak, p) <= _value(form.peak, p, m, passes), (p, m, passes)


@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.slice("2", "4", "6")
def test_two_directions_share_out_the_bubble(p: int) -> None:
    """Chimera where F = B; GEMS for each microbatch where B = 2 F, from the second on."""
    for m in (p, 2 * p, 3 * p + p % 4):
        found = _played(ORDERS["chimera"], p, m, (2, 1, 1))
        share = _most(found.bubble_s, p) / found.makespan_s
        assert share == pytest.approx((p - 2) / (2 * m + p - 2)), (p, m)
        assert p / 2 + 1 <= _most(found.peak, p) <= p, (p, m)
        gems = ORDERS["gems"]
        first, second = (_played(gems, p, each, (1, 1, 1)) for each in (m, m + 1))
        turn_s = second.makespan_s - first.makespan_s
        assert 1 - 3 / turn_s == pytest.approx((p - 1) / (p + 1 / 2))
        assert _most(first.peak, p) == 1


def test_every_order_has_its_statement_proved() -> None:
    proved = {name.partition(" ")[0] for name in EXACT} | set(BOUNDS) | {"chimera", "gems"}
    assert proved == set(ORDERS)
