"""Random orders: those that the check accepts can be played, and the others are told why not."""

from __future__ import annotations

import random
from graphlib import CycleError, TopologicalSorter

import pytest

from polyreme.plan.check_order import order_violations
from polyreme.plan.grid import Degrees, even_split
from polyreme.plan.ir import LayerPlan, Plan, Stage
from polyreme.plan.order import ORDERS
from polyreme.plan.order.kind import plan_order
from polyreme.plan.play import Costs, play

N_ROWS, N_EACH = 20, 500
KINDS = [order for order in ORDERS.values() if order.synchronous and order.slices == 1]


def _drawn(draw):
    """An order with some of its neighbouring actions swapped, as a plan; its number of stages."""
    while True:
        kind, p, m = draw.choice(KINDS), draw.randint(2, 4), draw.randint(1, 6)
        if kind.refused(p, m) is None:
            break
    placements = kind.placements(p)
    ranks = [list(own) for own in plan_order(kind, p, m, Costs.equal(len(placements)))]
    for _ in range(draw.choice((0, 1, 2, 4, 8))):
        own = draw.choice(ranks)
        at = draw.randrange(len(own) - 1)
        own[at], own[at + 1] = own[at + 1], own[at]
    stages = tuple(
        Stage(layers=(f"layer.{at}",), placements=tuple((rank,) for rank in held))
        for at, held in enumerate(placements)
    )
    plan = Plan(
        stages=stages,
        layer_plans={
            stage.layers[0]: LayerPlan(split=even_split(stage.placements[0], Degrees()))
            for stage in stages
        },
        order=tuple(map(tuple, ranks)),
        microbatches=m,
        global_batch=m,
        seq_len=1,
        precision="fp32",
    )
    return plan, len(stages)


def _has_a_circle(plan, n_stages):
    """By the library's own sorting: what a rank plays after what, and what passes need."""
    after: dict = {}
    done: dict = {}
    for rank, own in enumerate(plan.order):
        for at, action in enumerate(own):
            node = (rank, at)
            after.setdefault(node, set())
            if at:
                after[node].add((rank, at - 1))
            for kind in {"F": "F", "B": "BW", "I": "B", "W": "W"}.get(action.kind, ""):
                done[kind, action.stage, action.microbatch] = node
    for rank, own in enumerate(plan.order):
        for at, action in enumerate(own):
            stage, which = action.stage, action.microbatch
            needed = []
            if action.kind == "F" and stage:
                needed = [("F", stage - 1, which)]
            elif action.kind in "BI":
                needed = [("F", stage, which)]
                needed += [("B", stage + 1, which)] if stage + 1 < n_stages else []
            elif action.kind == "W":
                needed = [("B", stage, which)]
            after[rank, at].update(done[each] for each in needed)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return True
    return False


@pytest.mark.slice(1)
@pytest.mark.parametrize("row", range(N_ROWS))
def test_an_accepted_order_never_stands_still(row):
    """Ten thousand of them, in rows."""
    draw = random.Random(row)
    accepted = refused = circles = 0
    for _ in range(N_EACH):
        plan, n_stages = _drawn(draw)
        found = list(order_violations(plan))
        if found:
            refused += 1
            circles += any("waits" in violation.rule for violation in found)
            continue
        accepted += 1
        assert not _has_a_circle(plan, n_stages)
        played = play(plan.order, n_stages, Costs.equal(n_stages))
        assert sum(map(len, played.spans)) == sum(map(len, plan.order))
    assert min(accepted, refused, circles) > 10
