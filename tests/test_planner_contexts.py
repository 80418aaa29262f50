"""Devices that share the tokens of samples: priced, searched, read again, and not run."""

from __future__ import annotations

import msgspec
import pytest

from drawn import graph_of
from planner_toy import cluster, workload
from polyreme.errors import ConfigError
from polyreme.plan.check import check
from polyreme.plan.explain import text
from polyreme.plan.export import TOOLS, export
from polyreme.plan.grid import Degrees, even_degrees, even_split, grid_of
from polyreme.plan.options import Parallel
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.message import Message
from polyreme.planner.cost.traffic import Traffic
from polyreme.planner.draft import Draft, Strategy, read_draft
from polyreme.planner.hybrid import spaces
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.planner.space import write_plan
from polyreme.report.plan_words import glossary
from polyreme.runtime.making import grid_for
from test_planner_unlike import GRAPH, _profile

replace = msgspec.structs.replace
CP = Strategy(cp=2)


def _draft(strategy: Strategy, global_batch: int = 4, microbatches: int = 2) -> Draft:
    return Draft(
        strategies={layer.name: strategy for layer in GRAPH.layers},
        microbatches=microbatches,
        global_batch=global_batch,
        bucket_bytes=10**9,
        overlap=True,
    )


def _plan(strategy: Strategy = CP):
    return write_plan(_draft(strategy), workload(4))


def test_a_split_over_tokens_has_its_place_between_shards_and_tensor_parts():
    degrees = Degrees(replica=2, shard=2, cp=3, tp=2)
    split = even_split(range(24), degrees)
    assert even_degrees(split) == degrees
    plan = _plan(Strategy(shard=2, cp=3, tp=2, level="grads"))
    grid = grid_of(plan)
    cells = [grid.cell(device) for device in range(12)]
    assert [cell.tp for cell in cells] == [0, 1] * 6
    assert [cell.cp for cell in cells] == [0, 0, 1, 1, 2, 2] * 2
    assert [cell.shard for cell in cells] == [0] * 6 + [1] * 6
    assert (
        read_draft(plan).strategies
        == _draft(Strategy(shard=2, cp=3, tp=2, level="grads")).strategies
    )


def test_keys_and_values_are_gathered_each_way_and_their_gradients_summed():
    """By hand, for the heads of a tensor part: fewer of keys and values than parts are whole."""
    parts = Traffic(Memory(GRAPH, workload(4))).parts
    attention = graph_of("llama").build("block.0").block.self_attn
    n_tokens = GRAPH.inputs["input_ids"].shape[0]
    for tp in (1, 2, 4):
        own = attention.k_proj.out_features // min(tp, attention.config.num_key_value_heads)
        n_bytes = 3 * 2 * n_tokens * own * 4
        found = parts.exchanges("block.0", Strategy(cp=2, tp=tp, recompute=True), 3)
        gather, reduce = (
            Message(operation=operation, over="contexts", n_ranks=2, n_bytes=n_bytes)
            for operation in ("all_gather", "reduce_scatter")
        )
        of = [
            [message for message in messages if message.over == "contexts"]
            for messages in (found.forward, found.again, found.backward)
        ]
        assert of == [[gather], [gather], [gather, reduce]]
    assert not parts.exchanges("head", CP, 3).forward


def test_heads_are_dealt_out_where_that_sends_less():
    """GPT-2 has as many heads of keys as of queries; encoder and decoder differ in tokens."""
    for family, name in (("gpt2", "block.0"), ("t5", "decoder.block.0")):
        graph = graph_of(family)
        parts = Traffic(Memory(graph, workload(4))).parts
        contexts = graph.tensor_plan(name).contexts
        n_heads = contexts[0].run.units
        found = parts.exchanges(name, Strategy(cp=2, recompute=True), 3)
        turned = [
            Message(
                operation="all_gather",
                over="contexts",
                n_ranks=2,
                # a device's queries, keys, values, and what attention gives
                n_bytes=3 * (each.n_queries + each.n_tokens) * each.run.size * 4,
            )
            for each in contexts
        ]
        assert list(found.forward) == list(found.again) == list(found.backward) == turned
        assert len(contexts) == (2 if family == "t5" else 1)
        many = parts.exchanges(name, Strategy(cp=2 * n_heads), 3)
        assert "reduce_scatter" in {each.operation for each in many.backward}  # no head for each


def test_what_is_exchanged_between_layers_is_of_a_device_s_own_tokens():
    parts = Traffic(Memory(GRAPH, workload(4), 2)).parts
    for name in ("block.0", "head"):
        whole = parts.exchanges(name, Strategy(tp=2), 4)
        shared = parts.exchanges(name, Strategy(tp=2, cp=2), 4)
        for before, after in ((whole.forward, shared.forward), (whole.backward, shared.backward)):
            kept = [each.n_bytes for each in after if each.over == "parts"]
            assert kept == [each.n_bytes // 2 for each in before]


def test_gradients_are_summed_over_all_who_have_tokens_or_samples_of_their_own():
    traffic, names = Traffic(Memory(GRAPH, workload(8))), tuple(each.name for each in GRAPH.layers)
    both = traffic.buckets(_draft(Strategy(replica=2, cp=2)), names)
    assert {each.n_ranks for each in both} == {4}
    assert [each.n_bytes for each in both] == [
        each.n_bytes for each in traffic.buckets(_draft(Strategy(replica=4)), names)
    ]


def test_activations_and_passes_are_divided_and_states_are_not():
    where = cluster(4)
    prices = Prices(GRAPH, where, _profile(), workload(4))
    one, two = (
        prices.of(1).fitting.by_device(_draft(Strategy(cp=cp), microbatches=1))[0] for cp in (1, 2)
    )
    assert two["activations"] == one["activations"] // 2
    assert two["logits"] == one["logits"] // 2
    assert [two[c] for c in ("parameters", "gradients", "optimizer")] == [
        one[c] for c in ("parameters", "gradients", "optimizer")
    ]
    data = prices.of(1).cost.data
    assert data.layer_passes("block.0", CP, 4) == data.layer_passes("block.0", Strategy(), 2)


def test_a_search_offers_tokens_to_share_where_samples_are_too_few():
    """One sample on four devices: without them three have nothing but parts of tensors to do."""
    given = GRAPH, cluster(4), _profile(bytes_s=1e12), workload(1)
    fixed = Parallel(tp=1, pp=1, layouts="unlike")
    best = search(*given, fixed, top=1)[0]
    found = {strategy.cp for strategy in read_draft(best).strategies.values()}
    assert max(found) > 1
    (alike,) = search(*given, replace(fixed, layouts="alike"), top=1)
    assert best.estimate.step_s < alike.estimate.step_s
    again = price(*given, best)
    assert again.estimate.step_s == pytest.approx(best.estimate.step_s, rel=1e-9)


def test_no_other_search_offers_tokens_to_share():
    offered = spaces(GRAPH, cluster(4), workload(4), Parallel())
    assert {strategy.cp for space in offered for strategy in space.strategies} == {1}
    wanted = replace(Parallel(layouts="unlike"), cp=2)
    offered = spaces(GRAPH, cluster(4), workload(4), wanted)
    assert {strategy.cp for space in offered for strategy in space.strategies} == {2}


def test_a_model_whose_tokens_are_no_run_shares_none():
    graph = graph_of("vit")
    with pytest.raises(ConfigError, match=r'exceeds what layer "embed" allows.*Legal: 1') as said:
        list(spaces(graph, cluster(4), workload(4), Parallel(layouts="unlike", cp=2)))
    assert said.value.violations[0].path == "parallel.cp"


def test_nothing_runs_or_exports_a_plan_that_shares_tokens():
    plan = _plan()
    found = check(plan, GRAPH, cluster(4))
    assert any("needs cp, which is not executable yet" in each.rule for each in found)
    assert not check(plan, GRAPH, cluster(4), unlike=True)
    with pytest.raises(ConfigError, match="must split all layers alike"):
        grid_for(plan)
    for tool in TOOLS.values():
        with pytest.raises(ConfigError, match="share the tokens"):
            export(plan, tool)


def test_a_plan_that_shares_tokens_says_that_nothing_runs_it():
    given = GRAPH, cluster(2), _profile(bytes_s=1e12), workload(1)
    plans = search(*given, Parallel(cp=2, tp=1, pp=1, layouts="unlike"), top=1)
    assert grid_of(plans[0]).cp == 2
    assert "devices share the tokens of samples: planned, not executable yet" in text(plans)
    assert any(word == "2 cp" and "tokens" in meaning for word, meaning in glossary(plans[0]))
