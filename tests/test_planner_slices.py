"""A given plan's slices of tokens are priced as they are, not as the order would cut them."""

from __future__ import annotations

import msgspec
import pytest

from planner_toy import MS, cluster, profile, toy, workload
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.plan.order.terapipe import TeraPipe
from polyreme.plan.play import Costs
from polyreme.planner.search import price
from polyreme.planner.space import offer, write_plan

GRAPH = toy(1)  # four layers, 1 ms forward and 3 ms backward a sample
STAGE_S = 2 * 4 * (1 + 3) * MS  # of two layers and four samples


def _plan(n_slices: int, token_slices: tuple[int, ...] = (), *, name: str = "terapipe") -> Plan:
    parallel = Parallel(pp=2, order="terapipe", microbatch=4, replica=1, shard=1)
    draft = next(offer(GRAPH, cluster(2), workload(), parallel).drafts())
    assert draft.microbatches == 3
    actions = TeraPipe(n_slices).actions(2, 3, Costs.equal(2))
    plan = write_plan(msgspec.structs.replace(draft, actions=actions), workload())
    return msgspec.structs.replace(plan, token_slices=token_slices, order_name=name)


def _passes_s(plan: Plan) -> float:
    """Seconds of all passes; messages and the update, the same for all these plans, aside."""
    figures = profile(collective_ms=0.0)
    whole = price(GRAPH, cluster(2), figures, workload(), _plan(1)).estimate
    sliced = price(GRAPH, cluster(2), figures, workload(), plan).estimate
    assert [len(stage.layers) for stage in plan.stages] == [2, 2]
    assert whole.compute_s >= 4 * STAGE_S
    return 4 * STAGE_S + sliced.compute_s - whole.compute_s


@pytest.mark.parametrize(
    ("n_slices", "token_slices", "longest"),
    [(2, (), 1 / 2), (4, (), 1 / 4), (6, (), 1 / 6), (2, (2, 1), 2 / 3), (3, (1, 1, 1), 1 / 3)],
)
@pytest.mark.parametrize("name", ["terapipe", ""])
def test_all_slices_and_the_longest_on_the_way(n_slices, token_slices, longest, name):
    """Two slices counted as half a pass, six were out of range, and those of no name whole."""
    plan = _plan(n_slices, token_slices, name=name)
    assert _passes_s(plan) == pytest.approx((3 + longest) * STAGE_S)
