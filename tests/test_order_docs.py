"""The docs' example of adding an order is played, checked and trained with."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec

from beside import beside
from polyreme.plan.check import check_alone
from polyreme.plan.order import ORDERS
from polyreme.plan.order.kind import Order, plan_order
from polyreme.plan.play import Costs, play
from tiny import Case, Model

PAGE = Path(__file__).parents[1] / "docs" / "orders.md"


def _example() -> Order:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(source, names)
    return names["LastFirst"]()


def _planned(job):
    """The job's plan with the example's order."""
    plan = job.plan
    n, m = len(plan.stages), plan.microbatches
    order = plan_order(_example(), n, m, Costs.equal(n))
    return msgspec.structs.replace(plan, order=order, order_name="last-first")


def _ask_for_it(world, put, job):
    return dataclasses.replace(job, plan=_planned(job))


CASE = Case(model=Model(tied=True), plan={"pp": 2, "microbatches": 3}, global_batch=6)


def test_the_example_is_played_as_its_closed_form_says():
    order, costs = _example(), Costs.equal(4)
    played = play(order.actions(4, 6, costs), 4, costs)
    assert played.makespan_s == order.closed_form_s(4, 6, costs) == 27
    assert max(played.peak(rank) for rank in range(4)) == 6


def test_the_example_is_accepted_and_trains(pool, monkeypatch):
    monkeypatch.setitem(ORDERS, "last-first", _example())
    assert check_alone(_planned(CASE.job()), None) == []
    verdict = pool(2).run(beside, CASE, _ask_for_it)[0]
    assert verdict.first is None
    assert verdict.steps == 3


def test_every_order_has_a_row_in_the_docs():
    named = set(re.findall(r"`([a-z0-9-]+)`", PAGE.read_text()))
    assert set(ORDERS) <= named
