"""`polyreme check`: everything that is wrong is said at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import polyreme as pr
from devices import TWO
from planner_toy import cluster, toy
from polyreme.errors import ConfigError, Violation
from polyreme.plan import store
from polyreme.plan.check import check, check_alone
from polyreme.plan.ir import LayerPlan, Leaf, Plan, Stage, accumulation_order

DIGITS: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"kind": "digits"},
    "train": {"steps": 3, "global_batch": 16},
    "cluster": {"cpu_processes": 2},
}
TEXT: dict[str, Any] = {
    "model": {"kind": "char_lstm"},
    "data": {"kind": "python_source"},
    "train": {"steps": 3, "seq_len": 8},
}


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _plan(**changes: Any) -> Plan:
    names = tuple(layer.name for layer in toy().layers)
    plan = Plan(
        stages=(Stage(layers=names, placements=((0,),)),),
        layer_plans=dict.fromkeys(names, LayerPlan(split=Leaf(0))),
        order=(accumulation_order(1),),
        microbatches=1,
        global_batch=16,
        seq_len=1,
        precision="fp32",
    )
    return msgspec.structs.replace(plan, **changes)


def _violations(spec: dict[str, Any], *overrides: str, **how: Any) -> list[Violation]:
    with pytest.raises(ConfigError) as caught:
        pr.check(spec, overrides=overrides, **how)
    return list(caught.value.violations)


def _paths(spec: dict[str, Any], *overrides: str, **how: Any) -> set[str]:
    """Of what is wrong; nothing where nothing is."""
    try:
        pr.check(spec, overrides=overrides, **how)
    except ConfigError as error:
        return {violation.path for violation in error.violations}
    return set()


def test_a_sound_spec_is_not_refused() -> None:
    pr.check(DIGITS)


@TWO
def test_spec_machine_and_plan_are_all_judged_when_each_is_wrong() -> None:
    store.save(_plan(microbatches=0, bucket_bytes=0), Path("plan.json"))
    found = _paths(
        DIGITS,
        "train.steps=0",
        "train.min_devices=9",
        "parallel.shard=7",
        plan=Path("plan.json"),
        devices=2,
    )
    assert {"train.steps", "train.min_devices", "parallel.shard"} <= found
    assert {"plan.microbatches", "plan.bucket_bytes", "plan.inputs_hash"} <= found


def test_a_plan_is_judged_beside_a_spec_that_is_no_toml() -> None:
    Path("spec.toml").write_text("[model")
    Path("plan.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        pr.check("spec.toml", plan=Path("plan.json"))
    assert [each.path for each in caught.value.violations] == ["spec.toml", "plan"]


def test_the_machine_is_judged_beside_a_wrong_step_count() -> None:
    assert _paths(DIGITS, "train.steps=0", "parallel.shard=3") == {"train.steps", "parallel.shard"}


def test_the_topology_is_judged_beside_a_wrong_compressor() -> None:
    servers = "data_parallel.topology={kind='ParameterServer', servers=5}"
    ratio = "data_parallel.compress={kind='TopK', ratio=2}"
    found = _paths(DIGITS, servers, ratio)
    assert found == {"data_parallel.topology.servers", "data_parallel.compress.ratio"}


def test_a_spec_is_judged_for_the_workers_that_are_simulated() -> None:
    np.savetxt("matrix.txt", np.full((3, 3), 1 / 3))
    graph = "graph={kind='Matrix', path='matrix.txt'}"
    topology = f"data_parallel.topology={{kind='Gossip', {graph}}}"
    path = "data_parallel.topology.graph.path"
    assert _paths(DIGITS, topology) == {path}
    assert _paths(DIGITS, topology, workers=3) == set()
    assert _paths(DIGITS, topology, workers=4) == {path}


def test_a_partition_that_leaves_workers_without_samples_is_found() -> None:
    sync = "data_parallel.sync={kind='LocalSteps'}"
    partition = "data.partition={kind='dirichlet', alpha=1e-4}"
    assert _paths(DIGITS, sync, partition, workers=16) == {"data.partition"}
    assert _paths(DIGITS, sync, partition, workers=1) == set()
    many = ["data.partition='iid'", "train.global_batch=2000"]
    (found,) = _violations(DIGITS, *many, workers=2000)  # plain training is simulated too
    assert found.path == "data.partition"
    assert found.rule.endswith("more of 2000 without samples")


def test_a_split_that_a_simulation_would_leave_aside_is_refused() -> None:
    split = ("parallel.shard=2", "parallel.replica=2")
    assert _paths(DIGITS, *split, workers=4) == {"parallel.shard", "parallel.replica"}
    with pytest.raises(ConfigError) as caught:
        pr.simulate(DIGITS, overrides=split, workers=4)
    paths = {each.path for each in caught.value.violations}
    assert paths == {"parallel.shard", "parallel.replica"}
    assert _paths(DIGITS, "parallel.replica=4", workers=4) == set()


@pytest.mark.parametrize("sync", ["LocalSteps", "FedAvg", "LAG"])
def test_fewer_samples_than_workers_are_refused_on_both_clocks_before_a_run(sync: str) -> None:
    small = (f"data_parallel.sync={{kind='{sync}'}}", "train.global_batch=2")
    asked = {
        "check devices": lambda: pr.check(DIGITS, overrides=small, devices=3),
        "check workers": lambda: pr.check(DIGITS, overrides=small, workers=3),
        "check cluster": lambda: pr.check(DIGITS, overrides=(*small, "cluster.cpu_processes=3")),
        "train": lambda: pr.train(DIGITS, overrides=small, devices=3),
        "simulate": lambda: pr.simulate(DIGITS, overrides=small, workers=3),
    }
    said = "train.global_batch: 2 leaves some of 3 workers without a sample. Legal: 3 (or any"
    for name, call in asked.items():
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(said), name
        assert len(caught.value.violations) == 1, name
    assert not list(Path().glob("runs/*"))
    assert _paths(DIGITS, *small, devices=2) == _paths(DIGITS, *small, workers=2) == set()


def test_more_servers_than_parameters_are_refused_on_both_clocks_before_a_run() -> None:
    n = (3 * 32 * 32 + 1) * 16 + (16 + 1) * 10
    wide = (f"data_parallel.sync={{kind='ASGD', servers={n + 1}}}", "data_parallel.rule.kind='SGD'")
    asked = {
        "check": lambda: pr.check(DIGITS, overrides=wide),
        "check workers": lambda: pr.check(DIGITS, overrides=wide, workers=3),
        "train": lambda: pr.train(DIGITS, overrides=wide, devices=2),
        "simulate": lambda: pr.simulate(DIGITS, overrides=wide, workers=3),
    }
    said = f"data_parallel.sync.servers: {n + 1} is more than the model's {n} parameters"
    for name, call in asked.items():
        with pytest.raises(ConfigError) as caught:
            call()
        assert str(caught.value).startswith(said), name
        assert len(caught.value.violations) == 1, name
    assert not list(Path().glob("runs/*"))
    just = f"data_parallel.sync.servers={n}"
    assert _paths(DIGITS, *wide, just) == _paths(DIGITS, *wide, just, workers=3) == set()
    beside = _paths(DIGITS, *wide, "train.log_every=0")
    assert beside == {"train.log_every"}  # the model is built once nothing else is wrong


def test_epochs_beside_batches_of_federated_averaging_are_refused() -> None:
    sync = "data_parallel.sync={{kind='FedAvg', {0}}}"
    (found,) = _violations(DIGITS, sync.format("epochs=1, batches=2"))
    assert str(found).startswith(
        "data_parallel.sync.batches: 2 stands beside data_parallel.sync.epochs; at most one"
    )
    assert _paths(DIGITS, sync.format("epochs=2")) == set()
    assert _paths(DIGITS, sync.format("batches=2")) == set()


def test_plain_training_leaves_devices_out_and_simulates_no_worker_without_a_sample() -> None:
    assert _paths(DIGITS, "train.global_batch=2", devices=4) == set()
    assert _paths(DIGITS, "train.global_batch=2", workers=4) == {"train.global_batch"}
    wrong = ("train.global_batch=2", "data_parallel.sync.kind='FedAvg'", "train.steps=0")
    assert _paths(DIGITS, *wrong, devices=4) == {"train.global_batch", "train.steps"}


def test_a_batch_larger_than_the_data_is_refused() -> None:
    assert _paths(DIGITS, "train.global_batch=5000") == {"train.global_batch"}


@TWO
def test_violations_stand_once() -> None:
    found = _violations(DIGITS, "parallel.shard=3", "train.min_devices=9", devices=2)
    assert len({(each.path, each.rule) for each in found}) == len(found) == 2


@pytest.mark.parametrize(
    ("spec", "overrides", "path", "legal"),
    [
        (TEXT, ("train.keep_best='test_accuracy'",), "train.keep_best", '"heldout_loss"'),
        (
            TEXT,
            ("train.keep_best='heldout_loss'", "data.heldout=0"),
            "train.keep_best",
            "leave it out",
        ),
        (DIGITS, ("train.min_devices=3",), "train.min_devices", "2 (or any integer >= 1 and <= 2)"),
        (
            DIGITS,
            ("train.min_devices=1", "parallel.shard=2"),
            "train.min_devices",
            "2 (or any integer >= 2)",
        ),
    ],
)
@TWO
def test_keys_for_trouble_must_fit_data_and_devices(
    spec: dict[str, Any], overrides: tuple[str, ...], path: str, legal: str
) -> None:
    (found,) = _violations(spec, *overrides)
    assert (found.path, found.legal.startswith(legal)) == (path, True)


def test_a_plan_for_another_model_does_not_hide_its_other_faults() -> None:
    plan = _plan(microbatches=0, inputs_hash="graph:other")
    paths = {each.path for each in check_alone(plan, cluster(1))}
    assert paths == {"plan.microbatches"}
    assert paths <= {each.path for each in check(plan, toy(), cluster(1))}


def test_a_plan_of_absurd_numbers_is_judged_at_once() -> None:
    plan = _plan(microbatches=2**62, global_batch=2**62)
    found = check_alone(plan, cluster(1))
    assert 0 < len(found) < 20
    assert all(each.path.startswith("plan.order") for each in found)
