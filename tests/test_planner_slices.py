"""A given plan's slices of tokens are priced as they are, not as the order would cut them."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from drawn import FAMILIES
from planner_toy import MS, cluster, profile, toy, workload
from polyreme.cluster.parse import parse
from polyreme.graph.layer import LayerGraph
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.plan.order.terapipe import TeraPipe
from polyreme.plan.play import Costs
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.pipeline import StepCost
from polyreme.planner.cost.slices import SliceCost
from polyreme.planner.draft import Draft, Strategy
from polyreme.planner.search import price
from polyreme.planner.space import offer, write_plan
from polyreme.profile.assume import assume
from polyreme.profile.fit import Fit
from polyreme.sample import TensorSpec

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
    [(2, (), 2 / 3), (3, (), 1 / 3), (2, (1, 2), 2 / 3), (3, (1, 1, 1), 1 / 3)],
)
@pytest.mark.parametrize("name", ["terapipe", ""])
def test_all_slices_and_the_longest_on_the_way(n_slices, token_slices, longest, name):
    """Two slices counted as half a pass, more were out of range, and those of no name whole."""
    plan = _plan(n_slices, token_slices, name=name)
    assert _passes_s(plan) == pytest.approx((3 + longest) * STAGE_S)


class Causal(Fit):
    """Passes of one second a sample, of which so much is their start."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s

    def forward_s(self, kind: str, microbatch: int) -> float:
        return self.start_s + (1 - self.start_s) * microbatch

    def backward_s(self, kind: str, microbatch: int) -> float:
        return 0.0


def _causal(n_tokens: int, share: float) -> tuple[LayerGraph, Draft]:
    """Two stages of a layer whose attention has that share of its flops."""
    layer = GRAPH.layers[1]
    hidden = TensorSpec((n_tokens, 16))
    layers = tuple(
        msgspec.structs.replace(
            layer, name=name, outputs={"hidden": hidden}, flops=4 * n_tokens**2 * 16 / share
        )
        for name in ("block.0", "block.1")
    )
    graph = LayerGraph(
        name="causal",
        layers=layers,
        inputs={"input_ids": TensorSpec((n_tokens,), "int64")},
        output="block.1.hidden",
        builder=GRAPH,
    )
    strategies = {each.name: Strategy() for each in layers}
    draft = Draft(
        strategies=strategies,
        pp=2,
        stages=(("block.0",), ("block.1",)),
        holders=((0,), (1,)),
        order="terapipe",
        microbatches=1,
        global_batch=1,
        bucket_bytes=1,
        overlap=True,
    )
    return graph, draft


@pytest.mark.parametrize("start_s", [0.001, 0.05])
@pytest.mark.parametrize("attention", [0.2, 0.9])
def test_no_other_cut_of_the_tokens_makes_a_shorter_step(start_s, attention):
    """Equal slices of attention's cost get longer: later ones attend to more."""
    graph, draft = _causal(64, attention)
    cost = SliceCost(graph, Causal(start_s))
    best = cost.best(draft)

    def step_s(lengths):
        shares = cost.shares(draft, lengths)
        return sum(shares) + max(shares)

    assert sum(best) == 64
    ends = range(8, 64, 8)
    for n in range(len(ends) + 1):
        for cuts in itertools.combinations(ends, n):
            lengths = tuple(b - a for a, b in itertools.pairwise((0, *cuts, 64)))
            assert step_s(best) <= step_s(lengths) + 1e-12
    if attention > 0.5 and len(best) > 1:
        assert best[0] > best[-1]


def test_slices_do_not_pay_where_a_pass_is_all_start():
    graph, draft = _causal(64, 0.5)
    assert SliceCost(graph, Causal(1.0)).best(draft) == (64,)


def test_a_plan_has_the_slices_of_the_dynamic_programme():
    """The programme was there, and no plan came by it."""
    options, sample = FAMILIES["llama"]
    graph = options.graph(sample)
    figures = assume(graph, parse("preset:2xH100", "cluster"), "fp32")
    cost = StepCost(DataCost(Memory(graph, workload()), figures, cluster(2)))
    parallel = Parallel(pp=2, order="terapipe", microbatch=4, replica=1, shard=1)
    draft = next(offer(graph, cluster(2), workload(), parallel).drafts())
    found = cost.ordered(draft)
    n_tokens = graph.inputs["input_ids"].shape[0]
    assert sum(found.token_slices) == n_tokens
    assert max(each.token_slice for own in found.actions for each in own) + 1 == len(
        found.token_slices
    )
    assert cost(draft).step_s == cost(found).step_s
