"""Stages on several processes compute what one process computes, in every order."""

from __future__ import annotations

import pytest

from beside import beside
from polyreme.plan.order import ORDERS
from tiny import Case, Model

N_LAYERS = 4


def _verified(pool, case, n_steps=3):
    n = case.plan.get("pp", 1) * case.plan.get("replica", 1) * case.plan.get("shard", 1)
    verdicts = pool(n).run(beside, case, None, n_steps, timeout_s=120)
    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert verdicts[0].first is None, verdicts[0].first
    assert verdicts[0].steps == n_steps


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", [n for n, o in ORDERS.items() if o.synchronous])
def test_an_order_gives_the_gradients_of_one_process(pool, name, tied):
    plan = {"pp": 2, "order": name, "microbatches": 4}
    case = Case(model=Model(tied=tied), plan=plan, global_batch=8, clip_norm=0.5)
    _verified(pool, case)
