"""Plans: splits, files, one-line descriptions."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from polyreme.errors import ConfigError
from polyreme.plan.describe import describe
from polyreme.plan.grid import Degrees, even_degrees, even_split
from polyreme.plan.ir import (
    Estimate,
    LayerPlan,
    Leaf,
    Plan,
    Split,
    Stage,
    accumulation_order,
    degree,
    devices,
    stale_inputs,
)
from polyreme.plan.store import decode, encode, load, save


def _plan(split, n_layers=2, **how) -> Plan:
    layer_plan = LayerPlan(split=split, **how)
    names = tuple(f"block.{index}" for index in range(n_layers))
    order = accumulation_order(2)
    return Plan(
        stages=(Stage(layers=names, placements=(devices(split),)),),
        layer_plans=dict.fromkeys(names, layer_plan),
        order=(order,) * len(devices(split)),
        microbatches=2,
        global_batch=16,
        seq_len=8,
        precision="bf16",
    )


@pytest.mark.parametrize(("replica", "shard"), [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_degrees_come_back_from_the_split(replica, shard):
    used = tuple(range(10, 10 + replica * shard))
    split = even_split(used, Degrees(replica=replica, shard=shard))
    assert (degree(split, "replica"), degree(split, "shard")) == (replica, shard)
    assert degree(split, "tp") == 1
    assert devices(split) == used
    assert even_degrees(split) == Degrees(replica=replica, shard=shard)


def test_devices_that_play_alike_are_written_once():
    """4,096 devices made files of 180 MB."""
    first, other = (accumulation_order(n) for n in (2, 3))
    again = tuple(replace(action) for action in first)
    split = even_split(range(4), Degrees(replica=4))
    plan = replace(_plan(split), order=(first, other, first, again))
    data = encode(plan)
    assert msgspec.json.decode(data)["order"][2:] == [0, 0]
    found = decode(data)
    assert found.order == plan.order
    assert found.order[3] is found.order[0]
    for wrong in (4, 3, -1):
        odd = data.replace(b",0,0]", b",0,%d]" % wrong)
        assert odd != data
        with pytest.raises(msgspec.ValidationError, match="number of an earlier device"):
            decode(odd)


def test_uneven_and_foreign_splits_have_no_degrees():
    two = Split(axis="shard", weights=(1, 1), children=(Leaf(0), Leaf(1)))
    lopsided = Split(axis="replica", weights=(1, 1), children=(two, Leaf(2)))
    weighted = Split(axis="shard", weights=(2, 1), children=(Leaf(0), Leaf(1)))
    foreign = Split(axis="rows", weights=(1, 1), children=(Leaf(0), Leaf(1)))
    assert [even_degrees(split) for split in (lopsided, weighted, foreign)] == [None] * 3


@pytest.mark.parametrize("split", [Leaf(0), even_split((0, 1, 2, 3), Degrees(replica=2, shard=2))])
def test_a_plan_file_gives_the_plan_back(split, tmp_path: Path):
    plan = _plan(split, level="params", offload=frozenset({"optimizer"}))
    memory = ({"parameters": 1, "slack": 2},) * len(devices(split))
    estimate = Estimate(step_s=1.5, compute_s=1, comm_s=1, exposed_comm_s=0.5, memory=memory)
    plan = Plan(**{**{f: getattr(plan, f) for f in plan.__struct_fields__}, "estimate": estimate})
    save(plan, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_equal_trees_of_a_big_plan_become_one_object():
    plan = decode(
        encode(_plan(even_split(tuple(range(256)), Degrees(replica=32, shard=8)), n_layers=126))
    )
    assert len({id(layer_plan) for layer_plan in plan.layer_plans.values()}) == 1
    assert len({id(actions) for actions in plan.order}) == 1


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        (b'"microbatches": 2', b'"microbatches": "two"', "plan.microbatches"),
        (b'"level":"none"', b'"level":"all"', "plan.layer_plans[...].level"),
        (b'"microbatches": 2', b'"micro": 2', "plan"),
        (
            b'{"device":1}',
            b'{"device":1,"axis":"tp"}',
            "plan.layer_plans.block.0.split.children[1]",
        ),
        (b'"weights":[1,1]', b'"weights":[1]', "plan.layer_plans.block.0.split.weights"),
        (b"{\n", b"", "plan"),
    ],
)
def test_a_broken_plan_file_names_the_place(old, new, path, tmp_path: Path):
    data = encode(_plan(even_split((0, 1), Degrees(replica=1, shard=2))))
    assert old in data
    (tmp_path / "plan.json").write_bytes(data.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "plan.json")
    assert [violation.path for violation in caught.value.violations] == [path]


def test_a_missing_plan_file_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_stale_inputs_are_named():
    assert stale_inputs("graph:1 cluster:2 workload:3", "graph:1 cluster:9 workload:4") == (
        "cluster",
        "workload",
    )
    assert stale_inputs("", "graph:1") == ("graph",)


def test_descriptions_tell_plans_apart():
    assert describe(_plan(Leaf(3))) == "1 device, 2 microbatches of 8 samples"
    assert (
        describe(
            _plan(
                even_split((0, 1, 2, 3), Degrees(replica=2, shard=2)), level="grads", recompute=True
            )
        )
        == "2 replicas x 2 shards (grads), recompute, 2 microbatches of 2 samples"
    )
