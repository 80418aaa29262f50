"""Broken plans: every rule is named, and sound plans pass."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec
import pytest

from planner_toy import cluster, toy, workload
from polyreme.errors import ConfigError, literal
from polyreme.plan import store
from polyreme.plan.check import check
from polyreme.plan.check_order import order_violations
from polyreme.plan.grid import Degrees, even_split
from polyreme.plan.ir import (
    Action,
    Estimate,
    LayerPlan,
    Leaf,
    Plan,
    Search,
    Split,
    Stage,
    accumulation_order,
    hash_inputs,
)
from polyreme.plan.order import ORDERS
from polyreme.plan.order.kind import plan_order
from polyreme.plan.play import Costs

replace = msgspec.structs.replace
GRAPH = toy()
NAMES = tuple(layer.name for layer in GRAPH.layers)
FOUR = even_split((0, 1, 2, 3), Degrees(replica=2, shard=2))
REPLICAS = even_split((0, 1, 2, 3), Degrees(replica=4))


def _plan(**changes) -> Plan:
    plan = Plan(
        stages=(Stage(layers=NAMES, placements=((0, 1, 2, 3),)),),
        layer_plans=dict.fromkeys(NAMES, LayerPlan(split=FOUR, level="params")),
        order=(accumulation_order(3),) * 4,
        microbatches=3,
        global_batch=12,
        seq_len=3,
        precision="fp32",
    )
    return replace(plan, **changes)


def _paths(plan: Plan, n_devices: int = 4) -> list[str]:
    return [violation.path for violation in check(plan, GRAPH, cluster(n_devices))]


def _with(name: str, **changes) -> dict[str, LayerPlan]:
    plans = dict(_plan().layer_plans)
    return {**plans, name: replace(plans[name], **changes)}


def test_a_sound_plan_passes():
    assert _paths(_plan()) == []
    one = _plan(
        stages=(Stage(layers=NAMES, placements=((0,),)),),
        layer_plans=dict.fromkeys(NAMES, LayerPlan(split=Leaf(0))),
        order=(accumulation_order(3),),
    )
    assert _paths(one, 1) == []


def test_layers_are_in_exactly_one_stage():
    def staged(*names):
        return _plan(stages=(Stage(layers=names, placements=((0, 1, 2, 3),)),))

    (missing,) = check(staged(*NAMES[:-1]), GRAPH, cluster(4))
    assert (missing.value, missing.rule) == ("head", "is a layer in no stage")
    assert "stands 2 times" in str(check(staged(*NAMES, "head"), GRAPH, cluster(4))[0])
    assert "is no layer of toy" in str(check(staged(*NAMES, "tail"), GRAPH, cluster(4))[0])
    swapped = staged(NAMES[1], NAMES[0], *NAMES[2:])
    assert 'comes before "embed"' in str(check(swapped, GRAPH, cluster(4))[0])


def test_layer_plans_are_the_layers():
    plans = dict(_plan().layer_plans)
    plans["tail"] = plans.pop("head")
    assert _paths(_plan(layer_plans=plans)) == ["plan.layer_plans"] * 2


def test_devices_exist_and_come_once():
    assert _paths(_plan(), 3) == ["plan.stages[0].placements"]
    twice = Stage(layers=NAMES, placements=((0, 1, 2, 2),))
    assert "plan.stages[0].placements" in _paths(_plan(stages=(twice,)))
    half = _with("embed", split=even_split((0, 1), Degrees(replica=1, shard=2)))
    assert "plan.layer_plans.embed.split" in _paths(_plan(layer_plans=half))
    none = Stage(layers=NAMES, placements=())
    assert _paths(_plan(stages=(none,))) == ["plan.stages[0].placements"]


def test_no_more_microbatches_than_samples():
    assert _paths(_plan(global_batch=11)) == ["plan.microbatches"]
    assert _paths(_plan(global_batch=3)) == ["plan.global_batch"]
    zero = _plan(microbatches=0, order=(accumulation_order(0),) * 4)
    assert _paths(zero) == ["plan.microbatches"]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"sp": True}, "sp"),
        ({"offload": frozenset({"optimizer"})}, "offload"),
        (
            {"level": "grads", "split": even_split((0, 1, 2, 3), Degrees(replica=4, shard=1))},
            "level",
        ),
        (
            {"split": Split(axis="tp", weights=(1,) * 4, children=FOUR.children * 2)},
            "split",
        ),
        (
            {"split": Split(axis="replica", weights=(2, 1), children=FOUR.children)},
            "split",
        ),
    ],
)
def test_what_cannot_run_yet_is_named(changes, path):
    assert f"plan.layer_plans.block.0.{path}" in _paths(
        _plan(layer_plans=_with("block.0", **changes))
    )


def test_tied_layers_share_stage_and_level():
    apart = _with("head", level="grads")
    assert _paths(_plan(layer_plans=apart)) == ["plan.layer_plans.head.level"]


def test_memory_is_held_against_each_device():
    def estimated(*needs):
        memory = tuple({"parameters": need - 1, "slack": 1} for need in needs)
        return Estimate(step_s=1, compute_s=1, comm_s=0, exposed_comm_s=0, memory=memory)

    fits = 2**30
    assert _paths(_plan(estimate=estimated(fits, fits, fits, fits))) == []
    over = _plan(estimate=estimated(fits, fits, fits + 1, fits))
    assert _paths(over) == ["plan.estimate.memory[2]"]
    assert _paths(_plan(estimate=estimated(fits))) == ["plan.estimate.memory"]


def test_a_stale_plan_names_the_input_that_differs():
    made_for = hash_inputs(GRAPH, cluster(4), workload())
    plan = _plan(inputs_hash=made_for)
    assert check(plan, GRAPH, cluster(4), workload()) == []
    (other,) = check(plan, GRAPH, cluster(4), workload(precision="bf16"))
    assert (other.path, other.rule) == ("plan.precision", 'is "bf16" in the spec')
    others = replace(workload(), optimizer_states=1)
    (other,) = check(plan, GRAPH, cluster(4), others)
    assert other.rule == "was made for another workload"
    (other,) = check(plan, GRAPH, cluster(4, 4), workload())
    assert other.rule == "was made for another cluster"


@pytest.mark.parametrize(
    ("field", "value"), [("global_batch", 24), ("seq_len", 999), ("precision", "fp64")]
)
def test_what_an_edited_plan_says_and_the_spec_says_otherwise_is_refused(field, value):
    """The hash stands as it was, and a run went by the spec."""
    plan = _plan(inputs_hash=hash_inputs(GRAPH, cluster(4), workload()))
    (other,) = check(replace(plan, **{field: value}), GRAPH, cluster(4), workload())
    assert (other.path, other.value) == (f"plan.{field}", value)
    assert other.legal == literal(getattr(workload(), field))


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("step_s", -1.0, "plan.estimate.step_s"),
        ("comm_s", float("nan"), "plan.estimate.comm_s"),
        ("memory", ({"parameters": -1},), "plan.estimate.memory[0].parameters"),
    ],
)
def test_an_estimate_that_no_search_gives_is_refused(field, value, path):
    figures = {"step_s": 1.0, "compute_s": 1.0, "comm_s": 0.0, "exposed_comm_s": 0.0, "memory": ()}
    estimate = Estimate(**{**figures, field: value})
    assert path in _paths(_plan(estimate=estimate))


def test_unused_devices_are_those_of_no_stage():
    search = Search(solver="exact", objective_s=1, bound_s=1, proved=True, search_s=0, candidates=1)
    for device in (0, 99):
        found = _paths(_plan(search=replace(search, unused_devices=(device,))))
        assert found == ["plan.search.unused_devices"]


def _pipeline(name: str, played: str, microbatches: int = 3) -> Plan:
    """Stages on two devices that play one order and name another."""
    order = ORDERS[played]
    placed, n = order.placements(2), 2 * order.chunks
    edges = [round(at * len(NAMES) / n) for at in range(n + 1)]
    stages = tuple(
        Stage(layers=NAMES[start:end], placements=tuple((rank,) for rank in ranks))
        for (start, end), ranks in zip(pairwise(edges), placed, strict=True)
    )
    return _plan(
        stages=stages,
        layer_plans={
            layer: LayerPlan(split=Leaf(stage.placements[0][0]))
            for stage in stages
            for layer in stage.layers
        },
        order=plan_order(order, 2, microbatches, Costs.equal(n)),
        order_name=name,
        microbatches=microbatches,
    )


@pytest.mark.parametrize(
    ("name", "played"),
    [("gpipe", "1f1b"), ("1f1b", "zb-h1"), ("zb-h2", "zb-h1"), ("zb-v", "1f1b"), ("gems", "1f1b")],
)
def test_a_name_that_is_not_of_the_order_that_is_played_is_refused(name, played):
    assert _paths(_pipeline(played, played), 2) == []
    assert _paths(_pipeline("", played), 2) == []
    assert _paths(_pipeline(name, played), 2) == ["plan.order_name"]


@pytest.mark.parametrize("name", [name for name, order in ORDERS.items() if not order.by_costs])
def test_an_order_by_its_name_alone_does_not_depend_on_the_times_of_stages(name):
    order, n = ORDERS[name], 4 * ORDERS[name].chunks
    unlike = Costs(
        forward=tuple(1 + 0.3 * (stage % 3) for stage in range(n)),
        inputs=tuple(1.5 - 0.2 * (stage % 4) for stage in range(n)),
        weights=(0.5,) * n,
        send=0.1,
    )
    assert order.actions(4, 8, Costs.equal(n)) == order.actions(4, 8, unlike)


def test_lengths_of_slices_that_no_action_has_are_refused():
    plan = replace(_pipeline("1f1b", "1f1b"), token_slices=(2, 1))
    assert _paths(plan, 2) == ["plan.token_slices"]


def _actions(text: str) -> tuple[Action, ...]:
    """``F0 B0 U``; a digit before the letter is the stage."""
    found = []
    for word in text.split():
        stage = int(word[0]) if word[0].isdigit() else 0
        word = word.lstrip("0123456789")
        found.append(Action(stage=stage, kind=word[0], microbatch=int(word[1:] or 0)))
    return tuple(found)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("F0 B0 F1 B1 U", None),
        ("F0 F1 I0 I1 W1 W0 U", None),
        ("F0 B0 U", "has no forward pass"),
        ("F0 B0 F1 U", "has no whole backward pass after it"),
        ("F0 I0 F1 B1 U", "has no whole backward pass after it"),
        ("F0 B0 B0 F1 B1 U", "stands 2 times"),
        ("B0 F0 F1 B1 U", "comes after its backward pass"),
        ("F0 W0 I0 F1 B1 U", "has its W before its I"),
        ("F0 B0 I0 F1 B1 U", "has B and halves of it"),
        ("F0 B0 F1 U B1", "must be the last action of the stage, once"),
        ("F0 B0 F1 B1", "must be the last action of the stage, once"),
        ("F0 B0 F1 B1 F2 B2 U", "is no microbatch of the plan"),
        ("F0 B0 F1 B1 B2 U", "has no forward pass before it"),
        ("F0 B0 F1 B1 1F0 U", "is a stage that the device does not hold"),
    ],
)
def test_incomplete_orders_are_named(text, rule):
    plan = _plan(order=(_actions(text),) * 4, microbatches=2)
    rules = [violation.rule for violation in order_violations(plan)]
    assert rules == ([] if rule is None else [rule])


@pytest.mark.parametrize(
    ("first", "second", "stuck"),
    [
        ("0F0 0F1 0B0 0B1 0U", "1F0 1B0 1F1 1B1 1U", []),
        ("0F0 0B0 0F1 0B1 0U", "1F0 1F1 1B0 1B1 1U", ["F1 of stage 1", "B0 of stage 0"]),
    ],
)
def test_a_pipeline_that_waits_for_ever_is_found(first, second, stuck):
    stages = (
        Stage(layers=NAMES[:2], placements=((0,),)),
        Stage(layers=NAMES[2:], placements=((1,),)),
    )
    plan = _plan(stages=stages, order=(_actions(first), _actions(second)), microbatches=2)
    assert {violation.value for violation in order_violations(plan)} == set(stuck)


@pytest.mark.parametrize(
    ("field", "legal"), [("level", "grads"), ("precision", "bf16"), ("kind", '"F", "B"')]
)
def test_a_word_that_a_plan_file_does_not_know_is_refused_with_those_it_does(
    tmp_path, field, legal
):
    path = tmp_path / "plan.json"
    store.save(_pipeline("1f1b", "1f1b"), path)
    path.write_text(re.sub(rf'("{field}": ?)"[a-zA-Z0-9]+"', r'\1"wrong"', path.read_text()))
    with pytest.raises(ConfigError, match=legal):
        store.load(path)


def test_a_file_that_is_no_plan_is_refused_with_the_line_that_is_wrong(tmp_path):
    path = tmp_path / "plan.json"
    store.save(_pipeline("1f1b", "1f1b"), path)
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if '"microbatches"' in line)
    path.write_text(re.sub(r'("microbatches": ?)\d+', r"\1NaN", path.read_text()))
    with pytest.raises(ConfigError, match=rf"is no plan: .*line {at}\b"):
        store.load(path)
    (tmp_path / "spec.toml").write_text("[model]\n")
    with pytest.raises(ConfigError, match="is a specification, no plan"):
        store.load(tmp_path / "spec.toml")


def test_a_pipeline_without_a_layer_s_plan_is_said_not_raised():
    plan = _pipeline("1f1b", "1f1b")
    less = replace(plan, layer_plans={NAMES[0]: plan.layer_plans[NAMES[0]]})
    rules = [violation.rule for violation in check(less, GRAPH, cluster(2))]
    assert "has no layer plan" in rules


def test_unlike_layers_are_named_with_their_stages() -> None:
    """It said that 2 has layers with different degrees, and not what the 2 is."""
    plan = _plan(layer_plans=_with(NAMES[-1], split=REPLICAS, level="none"))
    found = check(plan, GRAPH, cluster(4))
    (rule,) = [each.rule for each in found if "has other degrees" in each.rule]
    assert rule == (
        f'layer "{NAMES[-1]}" of stage 0 has other degrees (replica 4) than layer "{NAMES[0]}" of '
        "stage 0 (replica 2, shard 2), which is not executable yet"
    )
