"""Layers laid out unlike each other: searched, priced, read again, and not run."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from drawn import FAMILIES, graph_of
from planner_toy import cluster, workload
from polyreme import api
from polyreme.errors import ConfigError
from polyreme.graph.layer import LayerGraph
from polyreme.plan import store
from polyreme.plan.check import check
from polyreme.plan.explain import text
from polyreme.plan.grid import grid_of, rows_of
from polyreme.plan.options import Parallel
from polyreme.planner.draft import read_draft
from polyreme.planner.hybrid import spaces
from polyreme.planner.outline import outlines
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.planner.solve.exact import exact
from polyreme.planner.sweep import Sweep
from polyreme.planner.unlike import unlike_spaces
from polyreme.profile.record import CollectiveTimes, LayerTimes, Profile

GRAPH = graph_of("llama")
UNLIKE = Parallel(layouts="unlike")
replace = msgspec.structs.replace


def _profile(rng: np.random.Generator | None = None, *, bytes_s: float = 1e8) -> Profile:
    """Passes that take as long for one sample as for eight; links of so many bytes a second."""
    draw = (lambda: 1.0) if rng is None else (lambda: float(rng.uniform(0.5, 2)))
    kinds = {layer.kind for layer in GRAPH.layers}
    layers = {
        kind: LayerTimes(
            microbatch=(1, 8),
            forward_s=(1e-3 * draw(), 2e-3),
            backward_s=(2e-3 * draw(), 4e-3),
            saved_bytes_per_sample=int(20_000 * draw()),
            recompute_bytes_per_sample=2_000,
        )
        for kind in kinds
    }
    groups = tuple(
        CollectiveTimes(
            n_devices=n,
            n_hosts=1,
            size_bytes=(1, 2**30),
            seconds=(1e-5, 1e-5 + 2**30 / bytes_s),
        )
        for n in (2, 4)
    )
    names = ("all_reduce", "all_gather", "reduce_scatter", "send", "all_to_all")
    return Profile(
        layers=layers,
        collectives=dict.fromkeys(names, groups),
        optimizer_s_per_byte=0.0,
        matmul_flops=1e12,
        overlap=0.5,
        context_bytes=1000,
        precision="fp32",
        assumed=False,
        date="2026-01-01",
        hardware="round",
        versions={},
        inputs_hash="",
    )


def _of_many_words() -> LayerGraph:
    options, sample = FAMILIES["llama"]
    config = {**options.config, "vocab_size": 4096}
    return replace(options, config=config).graph(sample)


def _outlines(prices: Prices, where, batch: int):
    offered = list(spaces(GRAPH, where, workload(batch), UNLIKE))
    return [each for space in unlike_spaces(offered) for each in outlines(space)]


@pytest.mark.parametrize("seed", range(6))
def test_an_instance_s_objective_is_what_the_step_of_its_draft_takes(seed):
    rng = np.random.default_rng(seed)
    where = cluster(4)
    prices = Prices(GRAPH, where, _profile(rng), workload(16))
    found = [each for each in _outlines(prices, where, 16) if each.space.pp == 1]
    compared = 0
    for outline in found:
        instance = prices.unlike.instance(outline)
        assert instance.n_strategies == len(outline.strategies)
        chosen = rng.integers(instance.n_strategies, size=instance.n_layers).tolist()
        names = outline.space.layers
        strategies = {name: outline.strategies[k] for name, k in zip(names, chosen, strict=True)}
        draft = outline.space.draft(strategies, outline.microbatches)
        if draft.is_alike:
            continue
        compared += 1
        objective_s = instance.objective_s([0] * len(chosen), chosen)
        assert objective_s == pytest.approx(prices.unlike.cost(draft).step_s, rel=1e-12)
    assert compared > 1


@pytest.mark.parametrize("seed", range(6))
def test_no_draft_needs_less_memory_than_its_instance_counts(seed):
    rng = np.random.default_rng(seed)
    where = cluster(4)
    prices = Prices(GRAPH, where, _profile(rng), workload(16))
    compared = 0
    for outline in _outlines(prices, where, 16):
        instance = prices.unlike.instance(outline)
        names, stages = outline.space.layers, outline.space.stages
        rows = outline.space.rows or (outline.layout.n_devices,) * len(stages or (names,))
        legal = [
            [k for k, each in enumerate(outline.strategies) if each.n_devices == n] for n in rows
        ]
        chosen = [
            int(rng.choice(legal[at])) for at, own in enumerate(stages or (names,)) for _ in own
        ]
        strategies = {name: outline.strategies[k] for name, k in zip(names, chosen, strict=True)}
        draft = outline.space.draft(strategies, outline.microbatches)
        if draft.is_alike:
            continue
        compared += 1
        assert draft.rows == rows
        of = [at for at, own in enumerate(stages or (names,)) for _ in own]
        held = instance.stage_times(of, chosen)[2]
        lacking = prices.unlike.fitting.shortfalls(draft)
        counted = (held - instance.capacity).tolist()
        assert all(more <= need + 1 for more, need in zip(counted, lacking, strict=True))
    assert compared > 1


def test_large_tables_are_cut_where_gradients_would_take_longer_than_their_passes():
    """Blocks gain nothing from parts; the vocabulary's gradients are most of what is sent."""
    graph = _of_many_words()
    given = graph, cluster(4), _profile(bytes_s=4e8), workload(16)
    fixed = Parallel(pp=1, recompute="none")
    (alike,) = search(*given, fixed, top=1)
    plans = search(*given, replace(fixed, layouts="unlike"), top=3)
    best = plans[0]
    assert grid_of(best) is None
    assert best.estimate.step_s < 0.99 * alike.estimate.step_s
    assert best.search.objective_s < alike.search.objective_s
    assert best.search.bound_s <= alike.search.bound_s
    assert "planned, not executable yet" in text(plans)
    priced = price(*given, replace(best, estimate=None, search=None))
    assert priced.estimate == best.estimate
    assert {name for row in best.estimate.layers for name in row.layers} == {
        layer.name for layer in graph.layers
    }
    draft = read_draft(best)
    assert not draft.is_alike
    assert draft.n_devices == 4


def test_an_instance_of_unlike_ranks_is_what_is_played():
    """Sum of all stages and the longest of them, borders in between, as the closed form has it."""
    rng = np.random.default_rng(5)
    prices = Prices(GRAPH, cluster(4), _profile(rng), workload(12))
    compared = set()
    for outline in _outlines(prices, cluster(4), 12):
        if not outline.space.rows:
            continue
        instance = prices.unlike.instance(outline)
        n_strategies = range(instance.n_strategies)
        of = [at for at, own in enumerate(outline.space.stages) for _ in own]
        for layer, stage in enumerate(of):
            legal = [k for k in n_strategies if np.isfinite(instance.time[stage, layer, k])]
            widths = {outline.strategies[k].n_devices for k in legal}
            assert widths == {outline.space.rows[stage]}
        compared.add(outline.space.rows)
    assert compared == {(1, 3), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)}


def test_a_stage_of_long_layers_is_given_more_devices():
    """One layer takes three times as long as the others together, and cannot be cut in two."""
    figures = _profile(bytes_s=1e12)
    heavy = replace(figures.layers["head"], forward_s=(9e-3, 72e-3), backward_s=(18e-3, 144e-3))
    light = replace(figures.layers["block"], forward_s=(1e-3, 8e-3), backward_s=(2e-3, 16e-3))
    kinds = {kind: heavy if kind == "head" else light for kind in figures.layers}
    where = cluster(4)
    types = {name: replace(each, memory_bytes=10**9) for name, each in where.device_types.items()}
    given = GRAPH, replace(where, device_types=types), replace(figures, layers=kinds), workload(24)
    fixed = Parallel(pp=2, tp=1, cp=1, recompute="none", layouts="unlike")
    plans = search(*given, fixed, top=1)
    rows = rows_of(plans[0])
    assert [len(row) for row in rows.pipes] == [1, 3]
    assert rows.devices == (0, 1, 2, 3)
    (alike,) = search(*given, replace(fixed, layouts="alike"), top=1)
    assert plans[0].microbatches == 8  # of 3 samples on the first device, of 1 on each other
    assert plans[0].estimate.step_s == pytest.approx(9 * 27e-3, rel=0.01)
    assert alike.estimate.step_s > 1.3 * plans[0].estimate.step_s
    assert len(plans[0].order) == len(plans[0].estimate.memory) == 4
    priced = price(*given, replace(plans[0], estimate=None, search=None))
    assert priced.estimate == plans[0].estimate
    assert not check(plans[0], GRAPH, given[1], unlike=True)
    assert check(plans[0], GRAPH, given[1])
    other = replace(plans[0], order=(*plans[0].order[:3], plans[0].order[0]))
    assert check(other, GRAPH, given[1], unlike=True)


@pytest.mark.parametrize(("family", "n"), [("llama", 1), ("resnet", 2)])
def test_one_device_or_batch_statistics_leave_nothing_unlike(family, n):
    offered = list(spaces(graph_of(family), cluster(n), workload(), UNLIKE))
    assert offered
    assert not list(unlike_spaces(offered))


SPEC = {
    "model": {"kind": "mlp", "hidden": [64]},
    "data": {"kind": "digits"},
    "train": {"steps": 1, "global_batch": 8},
    "cluster": {"cpu_processes": 2},
    "data_parallel": {"rule": {"kind": "SGD", "lr": 0.1}},
}


def test_such_plans_are_not_run(tmp_path):
    spec = {**SPEC, "parallel": {"layouts": "unlike"}}
    for run in (
        lambda: api.train(spec, out=tmp_path / "run"),
        lambda: api.verify(spec),
        lambda: api.check(spec),
    ):
        with pytest.raises(ConfigError, match="planned, but not executable yet"):
            run()
    assert not (tmp_path / "run").exists()


def test_such_a_plan_is_explained_from_its_file(tmp_path):
    graph = _of_many_words()
    given = graph, cluster(4), _profile(bytes_s=4e8), workload(16)
    plans = search(*given, Parallel(pp=2, layouts="unlike", recompute="none"), top=2)
    path = tmp_path / "plan.json"
    store.save(plans[0], path, plans)
    api.explain(path, out=tmp_path / "plan.html", trace=tmp_path / "trace.json")
    assert "not executable yet" in (tmp_path / "plan.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert store.load(path) == plans[0]


def test_when_time_is_over_and_a_plan_is_known_no_unlike_one_is_looked_for():
    """Nothing was found among them yet: that is no reason to go on."""
    prices = Prices(GRAPH, cluster(4), _profile(), workload(16))
    offered = list(spaces(GRAPH, cluster(4), workload(16), UNLIKE))
    sweep = Sweep((space, prices.unlike) for space in unlike_spaces(offered))
    solved = []

    def solve(instance, **limits):
        solved.append(instance)
        return exact(instance, **limits)

    late = sweep(solve, end_s=0.0, below=1e9)
    assert not solved
    assert (late.found, late.whole) == ((), False)
    assert late.bound_s < 1e9
    first = sweep(solve, end_s=0.0)
    assert len(first.found) == 1
    assert solved
