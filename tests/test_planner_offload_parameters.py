"""Parameters and gradients in hosts' memory too: priced by hand, searched, read again, not run."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from drawn import graph_of
from planner_toy import cluster, workload
from polyreme import api
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan import store
from polyreme.plan.check import check
from polyreme.plan.describe import describe
from polyreme.plan.explain import text
from polyreme.plan.export import TOOLS, export
from polyreme.plan.ir import OFFLOADED
from polyreme.plan.options import Parallel
from polyreme.planner.cost.memory import Storage
from polyreme.planner.draft import Draft, Strategy, read_draft
from polyreme.planner.hybrid import spaces
from polyreme.planner.prices import Prices
from polyreme.planner.search import price, search
from polyreme.report.plan_words import glossary
from test_planner_offload import ONE, STATES, _cluster
from test_planner_unlike import GRAPH, SPEC, _outlines, _profile

replace = msgspec.structs.replace
ELEMENTS = {layer.name: layer.param_count for layer in GRAPH.layers}
ALL, TABLE, BLOCK = sum(ELEMENTS.values()), ELEMENTS["embed"], ELEMENTS["block.0"]
BYTES_S = 1e6
HOSTED = {"parameters", "gradients", "optimizer"}


def _draft(strategy: Strategy, graph=GRAPH, **more) -> Draft:
    how = dict.fromkeys((layer.name for layer in graph.layers), strategy)
    fixed = {"microbatches": 1, "global_batch": 4, "bucket_bytes": 10**9, "overlap": True}
    return Draft(strategies=how, **{**fixed, **more})


def _prices(graph=GRAPH, *, precision: str = "fp32", batch: int = 4, n: int = 2) -> Prices:
    return Prices(graph, _cluster(n), _profile(), workload(batch, precision))


def _more_s(prices: Prices, how: Strategy, **more) -> tuple[float, float]:
    """Exposed seconds of the passes and of the update that hosts' memory adds to a step."""
    cost = prices.of(1).cost
    here, there = (cost(_draft(each, **more)) for each in (how, replace(how, offload="parameters")))
    assert there.comm_s - here.comm_s == pytest.approx(there.exposed_comm_s - here.exposed_comm_s)
    return there.exposed_comm_s - here.exposed_comm_s, there.update_s - here.update_s


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize(("precision", "copy"), [("fp32", 4), ("bf16", 2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_whole_layers_come_for_each_pass_and_their_gradients_go(rounds, precision, copy, recompute):
    """Only a table that is looked up in is not read by its backward pass."""
    how = Strategy(recompute=recompute)
    given = {"microbatches": rounds, "global_batch": 4}
    passes_s, update_s = _more_s(_prices(precision=precision, n=1), how, **given)
    read = ALL if recompute else ALL - TABLE
    moved = rounds * copy * (ALL + read) + 4 * ALL * (2 * rounds - 1)
    assert passes_s == pytest.approx(moved / BYTES_S)
    assert update_s == pytest.approx(4 * ALL * (STATES + 2) / BYTES_S)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("level", "each_pass", "each_sum"),
    [("params", True, True), ("grads", False, True), ("optimizer", False, False)],
)
def test_shards_come_when_they_are_gathered_and_go_when_they_are_reduced(
    rounds, level, each_pass, each_sum
):
    given = {"microbatches": rounds, "global_batch": 4}
    passes_s, update_s = _more_s(_prices(), Strategy(shard=2, level=level), **given)
    comes = rounds * (ALL + ALL - TABLE) if each_pass else ALL
    sums = ALL * (2 * rounds - 1) if each_sum else ALL
    assert passes_s == pytest.approx(4 * (comes + sums) / 2 / BYTES_S)
    assert update_s == pytest.approx(4 * ALL * (STATES + 2) / 2 / BYTES_S)


@pytest.mark.parametrize(
    ("how", "visits"),
    [
        (Strategy(replica=2), 4 * BLOCK + 4 * BLOCK),
        (Strategy(shard=2, level="params"), (4 * BLOCK + 4 * BLOCK) // 2),
        (Strategy(shard=2, level="grads"), (4 * BLOCK + 4 * BLOCK) // 2),
    ],
)
def test_a_device_holds_the_largest_layer_while_it_runs_and_its_host_holds_all(how, visits):
    prices, there = _prices(), replace(how, offload="parameters")
    for fitting in (prices.of(1).fitting, prices.unlike.fitting):
        given = {"microbatches": 2, "global_batch": 8}  # gradients are there in all passes
        kept, left = (fitting.by_device(_draft(each, **given))[0] for each in (how, there))
        assert [left[cause] for cause in sorted(HOSTED)] == [0, 0, 0]
        assert left["buffers"] == kept["buffers"] + visits
        assert left["slack"] == pytest.approx(kept["slack"] + 0.05 * visits, abs=1)
        rest = {*kept} - HOSTED - {"buffers", "slack"}
        assert {cause: left[cause] for cause in rest} == {cause: kept[cause] for cause in rest}
        held = fitting.on_host(_draft(there), 0, 0)
        assert held == Storage(**{cause: kept[cause] for cause in HOSTED})


def test_gradients_summed_whole_on_the_device_have_no_share_stored_there():
    """Level "optimizer" adds up microbatches whole, of which what is stored takes a share else."""
    prices = _prices()
    how = Strategy(shard=2, level="optimizer")
    given = {"microbatches": 2, "global_batch": 4}
    kept, left = (
        prices.of(1).fitting.by_device(_draft(each, **given))[0]
        for each in (how, replace(how, offload="parameters"))
    )
    visits = (4 * BLOCK + 4 * BLOCK) // 2
    assert left["buffers"] == kept["buffers"] + kept["gradients"] + visits


def test_a_tied_table_comes_to_both_layers_that_read_it():
    graph = graph_of("llama tied")
    prices = _prices(graph, n=1)
    whole = sum(layer.param_count for layer in graph.layers)
    memory = prices.of(1).fitting.memory
    how = Strategy(offload="parameters")
    head = memory.fetched("head", how)
    assert head.n_bytes == 8 * (graph.layer("head").param_count + TABLE)
    assert head.whole == head.whole_gradients
    passes_s, _ = _more_s(prices, Strategy(), graph=graph)
    assert passes_s == pytest.approx(4 * (3 * (whole + TABLE) - TABLE) / BYTES_S)


def test_of_experts_that_are_dealt_out_a_device_fetches_its_own():
    graph = graph_of("mixtral")
    memory = _prices(graph).of(1).fitting.memory
    how = Strategy(shard=2, level="params", ep=2, offload="parameters")
    name = next(each.name for each in graph.layers if graph.expert_plan(each.name) is not None)
    shapes = memory.classes.shapes[name].params
    experts = sum(each.n_elements for each in shapes if each.expert)
    rest = sum(each.n_elements for each in shapes if not each.expert)
    found = memory.fetched(name, how)
    assert (found.whole, found.cut) == (4 * experts // 2, 4 * rest // 2)
    assert (found.whole_gradients, found.cut_gradients) == (found.whole, found.cut)


def test_gradients_of_weights_do_not_wait_for_a_layer_that_is_gone():
    cost = _prices(n=1).of(1).cost
    here, there = (
        cost.costs(_draft(Strategy(offload=each))) for each in ("optimizer", "parameters")
    )
    assert here.weights[0] > 0
    assert there.weights == (0.0,)


def test_two_copies_of_a_stage_play_half_of_the_microbatches_each():
    how = _draft(Strategy(), microbatches=4, holders=((0, 1), (1, 0)))
    assert how.rounds == 2
    assert _draft(Strategy(), microbatches=4).rounds == 4


def test_an_account_says_how_long_each_layer_waits_for_its_host():
    fixed = replace(ONE, offload="parameters", replica=1, shard=1, recompute="none")
    plan = search(GRAPH, _cluster(1), _profile(), workload(4), fixed, top=1)[0]
    rows = {name: row for row in plan.estimate.layers for name in row.layers}
    m = plan.microbatches
    for name, n in ELEMENTS.items():
        passes = m * 4 * n * (1 if name == "embed" else 2) + 4 * n * (2 * m - 1)
        assert rows[name].hosted_s == pytest.approx(passes / BYTES_S)
        assert rows[name].stored_bytes == 0
    hosted_s = sum(rows[name].hosted_s for name in ELEMENTS)
    assert plan.estimate.exposed_comm_s == pytest.approx(hosted_s)
    passes_s = sum(rows[n].forward_s + rows[n].backward_s for n in ELEMENTS)
    assert plan.estimate.step_s == pytest.approx(passes_s + hosted_s + plan.estimate.update_s)


@pytest.mark.parametrize("seed", range(4))
def test_an_instance_adds_up_what_the_account_has(seed):
    """Its objective is the step of its draft, and no draft needs less than it counts."""
    rng = np.random.default_rng(seed)
    where = _cluster(4)
    prices = Prices(GRAPH, where, _profile(rng), workload(16))
    compared = stages_compared = 0
    for outline in _outlines(prices, where, 16):
        instance = prices.unlike.instance(outline)
        names, stages = outline.space.layers, outline.space.stages
        rows = outline.space.rows or (outline.layout.n_devices,) * len(stages or (names,))
        offered = range(len(outline.strategies))
        legal = [[k for k in offered if outline.strategies[k].n_devices == n] for n in rows]
        of = [at for at, own in enumerate(stages or (names,)) for _ in own]
        chosen = [int(rng.choice(legal[at])) for at in of]
        how = {name: outline.strategies[k] for name, k in zip(names, chosen, strict=True)}
        draft = outline.space.draft(how, outline.microbatches, stages)
        if draft.is_alike or not draft.fetches:
            continue
        compared += 1
        held = instance.stage_times(of, chosen)[2]
        lacking = prices.unlike.fitting.shortfalls(draft)
        counted = (held - instance.capacity).tolist()
        assert all(more <= need + 1 for more, need in zip(counted, lacking, strict=True))
        if outline.space.pp == 1:
            step_s = prices.unlike.cost(draft).step_s
            assert instance.objective_s(of, chosen) == pytest.approx(step_s, rel=1e-12)
        else:
            stages_compared += 1
    assert compared > stages_compared > 1


def _needs(fitting, how: Strategy, **more) -> int:
    return sum(fitting.by_device(_draft(how, **more))[0].values())


FIXED = replace(ONE, replica=1, shard=1, recompute="none", microbatch=2)


def test_a_model_that_fits_only_so_is_planned_so():
    figures, given = _profile(), {"microbatches": 2, "global_batch": 4}
    fitting = Prices(GRAPH, _cluster(1), figures, workload(4)).of(1).fitting
    least, more = (
        _needs(fitting, Strategy(offload=each), **given) for each in ("parameters", "optimizer")
    )
    where = _cluster(1, memory_bytes=(least + more) // 2)
    plan = search(GRAPH, where, figures, workload(4), FIXED, top=1)[0]
    found = [each.offload for each in read_draft(plan).strategies.values()]
    assert "parameters" in found
    assert {*found} > {"parameters"}  # no more than has to be: it takes time
    assert plan.assumed
    for fixed in ("optimizer", "none"):
        with pytest.raises(Infeasible) as said:
            search(GRAPH, where, figures, workload(4), replace(FIXED, offload=fixed), top=1)
        assert any(each.startswith('parallel.offload = "') for each in said.value.ways_out)
    with pytest.raises(Infeasible):
        search(GRAPH, _cluster(1, memory_bytes=least - 1), figures, workload(4), FIXED, top=1)


def test_a_model_that_fits_without_stays_on_its_devices():
    given = GRAPH, _cluster(2), _profile(), workload(4)
    plan, alone = (search(*given, each, top=1)[0] for each in (ONE, replace(ONE, offload="none")))
    assert not read_draft(plan).offloads
    assert replace(plan, search=None) == replace(alone, search=None)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("share", [0.02, 0.2, 0.4, 0.6, 0.8, 1.0])
def test_a_search_finds_what_trying_every_draft_finds(n, share):
    figures, batch = _profile(), 4 * n
    given = {"microbatches": 2, "global_batch": batch, "bucket_bytes": 0}
    kinds = [Strategy(replica=n, offload=each) for each in OFFLOADED]
    fitting = Prices(GRAPH, _cluster(n), figures, workload(batch)).of(1).fitting
    needs = sorted(_needs(fitting, each, **given) for each in kinds)
    memory_bytes = int(needs[0] + share * (needs[-1] - needs[0]))
    where = _cluster(n, memory_bytes=memory_bytes)
    prices = Prices(GRAPH, where, figures, workload(batch))
    best_s = np.inf
    for chosen in itertools.product(kinds, repeat=len(ELEMENTS)):
        draft = replace(
            _draft(kinds[0], **given), strategies=dict(zip(ELEMENTS, chosen, strict=True))
        )
        pricing = prices.pricing(draft)
        if pricing.fitting(draft).fits:
            best_s = min(best_s, pricing.cost(draft).step_s)
    fixed = replace(FIXED, replica=n)
    plan = search(GRAPH, where, figures, workload(batch), fixed, top=1)[0]
    assert plan.estimate.step_s == pytest.approx(best_s, rel=1e-9)


def test_a_host_that_is_too_small_takes_no_layer_more():
    figures, how = _profile(), _draft(Strategy(replica=2, offload="parameters"))
    held = Prices(GRAPH, _cluster(), figures, workload(4)).of(1).fitting.on_host(how, 0, 0)
    both = 2 * (held.parameters + held.gradients + held.optimizer)
    for host_bytes in (both, both - 1):
        prices = Prices(GRAPH, _cluster(host_bytes=host_bytes), figures, workload(4))
        for fitting in (prices.of(1).fitting, prices.unlike.fitting):
            room = fitting(how)
            assert room.fits == (host_bytes == both)
            if not room.fits:
                assert room.over_bytes == 1
                named = {f"{cause} in the memory of host-0" for cause in HOSTED}
                assert {*room.need_bytes} == named
    where = _cluster(memory_bytes=10**9, host_bytes=both - 1)
    fixed = replace(ONE, offload="parameters", replica=2, shard=1)
    with pytest.raises(Infeasible) as said:
        search(GRAPH, where, figures, workload(4), fixed, top=1)
    assert 'parallel.offload = "none"' in said.value.ways_out
    assert not any("of memory" in each for each in said.value.ways_out)  # of devices: no help


def test_a_fixed_offload_is_what_every_layer_has():
    for fixed in OFFLOADED:
        offered = spaces(GRAPH, _cluster(), workload(4), replace(ONE, offload=fixed))
        assert {each.offload for space in offered for each in space.strategies} == {fixed}
    with pytest.raises(ConfigError, match="needs the bandwidth between device type") as said:
        list(spaces(GRAPH, cluster(2), workload(4), replace(ONE, offload="parameters")))
    assert said.value.violations[0].value == "parameters"
    assert [each.path for each in Parallel(offload="parameters").check()] == ["parallel.offload"]


@pytest.fixture(scope="module")
def plan():
    fixed = replace(ONE, offload="parameters")
    return search(GRAPH, _cluster(), _profile(), workload(4), fixed, top=1)[0]


def test_such_a_plan_is_read_priced_and_explained(plan, tmp_path):
    path = tmp_path / "plan.json"
    store.save(plan, path)
    assert store.load(path) == plan
    assert {each.offload for each in plan.layer_plans.values()} == {OFFLOADED["parameters"]}
    assert not check(plan, GRAPH, _cluster(), unlike=True)
    again = price(GRAPH, _cluster(), _profile(), workload(4), replace(plan, estimate=None))
    assert again.estimate == plan.estimate
    words = "gradients + optimizer + parameters offloaded"
    assert words in describe(plan)
    assert words in dict(glossary(plan))
    assert "parameters, gradients and optimizer states lie in hosts' memory: planned" in text(
        [plan]
    )
    api.explain(path, out=tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "to and from host" in page
    assert words in page


@pytest.mark.long
def test_a_plan_that_offloads_parameters_is_not_run(tmp_path):
    """Nor one that says it of one layer, in a file."""
    made = api.plan(SPEC, out=tmp_path / "plan.json")
    assert made
    known = store.load(tmp_path / "plan.json")
    name, first = next(iter(known.layer_plans.items()))
    first = replace(first, offload=OFFLOADED["parameters"])
    path = tmp_path / "other.json"
    store.save(replace(known, layer_plans={**known.layer_plans, name: first}), path)
    with pytest.raises(ConfigError, match=r"offload.*is not executable yet"):
        api.train({**SPEC, "parallel": {"plan": str(path)}}, out=tmp_path / "run")
    fixed = {"layouts": "unlike", "offload": "parameters"}
    with pytest.raises(ConfigError, match="not executable yet"):
        api.train({**SPEC, "parallel": fixed}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tool", TOOLS)
def test_no_tool_is_told_of_it(plan, tool):
    with pytest.raises(ConfigError, match="are offloaded, which is not exported"):
        export(plan, TOOLS[tool])


def test_other_parts_of_a_layer_are_not_offloaded_alone(plan):
    name, first = next(iter(plan.layer_plans.items()))
    odd = replace(first, offload=frozenset({"parameters"}))
    given = replace(plan, layer_plans={**plan.layer_plans, name: odd})
    found = check(given, GRAPH, _cluster(), unlike=True)
    assert [each.path for each in found] == [f"plan.layer_plans.{name}.offload"]
    with pytest.raises(ConfigError, match="cannot be priced yet"):
        price(GRAPH, _cluster(), _profile(), workload(4), given)


def test_layers_that_share_a_table_keep_it_in_one_place():
    graph = graph_of("llama tied")
    fixed = replace(ONE, offload="parameters")
    plan = search(graph, _cluster(), _profile(), workload(4), fixed, top=1)[0]
    head = replace(plan.layer_plans["head"], offload=frozenset())
    given = replace(plan, layer_plans={**plan.layer_plans, "head": head})
    found = check(given, graph, _cluster(), unlike=True)
    assert "plan.layer_plans.head.offload" in [each.path for each in found]
