"""The functions behind the commands, from Python."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import msgspec
import pytest
import torch

import polyreme as pr
from polyreme.api import steps
from polyreme.cluster import accelerator
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan import store

SPEC = {
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"kind": "digits"},
    "train": {"steps": 3, "global_batch": 16},
}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, warm: None):
    """An accelerator of its own name and memory, over tensors of the host."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entry = HostAccelerator(name="toy", memory_limit_bytes=3 * 2**30)
    accelerator.register(entry)
    yield entry
    accelerator.unregister("toy")


@pytest.mark.long
def test_a_registered_accelerator_is_trained_on_within_its_memory(toy, tmp_path):
    summary = pr.train(SPEC, out=tmp_path / "run", devices=2)
    assert summary.status == "done"
    assert (summary.steps, summary.devices) == (3, 2)
    assert summary.measured["capacity_bytes"] == toy.memory_limit_bytes
    written = tomllib.loads((tmp_path / "run" / "spec.toml").read_text())
    assert written["train"]["steps"] == 3


def test_memory_of_a_registered_accelerator_limits_the_plan(toy, tmp_path):
    large = {
        "model": {"preset": "llama-7b", "config": {"num_hidden_layers": 4}},
        "data": {"kind": "python_source"},
        "train": {"steps": 3, "global_batch": 2, "seq_len": 512},
    }
    profile = pr.profile(large, assume=True, devices=2)
    with pytest.raises(Infeasible) as raised:
        pr.plan(large, profile=profile, devices=2)
    assert raised.value.have_bytes == toy.memory_limit_bytes


def test_what_no_measurement_could_allow_is_refused_before_one(monkeypatch):
    def measured(*_, **__):
        raise AssertionError("was measured")

    monkeypatch.setattr(steps, "measured_profile", measured)
    with pytest.raises(ConfigError, match="cannot be split"):
        pr.plan({**SPEC, "parallel": {"pp": 2, "tp": 2}}, devices=4)


def test_rooms_are_functions_too(tmp_path):
    plans = pr.plan(SPEC, assume=True, cluster="preset:2xH100", out=str(tmp_path / "plan.json"))
    assert plans[0].assumed
    assert (tmp_path / "plan.json").exists()
    assert json.loads((tmp_path / "plan.json").read_text())["top"]
    assert store.load(tmp_path / "plan.json") == plans[0]
    with pytest.raises(AttributeError, match="fly"):
        pr.fly()


@pytest.mark.parametrize("spec", [3, None, []])
def test_what_is_no_specification_is_said(spec):
    with pytest.raises(ConfigError, match="is no specification"):
        pr.plan(spec)


def test_a_tensor_in_place_of_a_sample_is_answered_with_what_is_wanted():
    module = torch.nn.Sequential(torch.nn.Linear(4, 2))
    with pytest.raises(ConfigError, match=r"pr\.SampleSpec") as raised:
        pr.graph(module, torch.zeros(1, 4))
    assert raised.value.violations[0].path == "sample"
    fields = {"features": pr.TensorSpec((4,), "float32"), "labels": pr.TensorSpec((), "int64")}
    assert pr.graph(module, pr.SampleSpec(fields=fields, n_classes=2)).param_count == 10


def test_a_batch_larger_than_the_data_is_found_by_check_and_moves_no_run(toy, tmp_path):
    folder = tmp_path / "run"
    pr.train(SPEC, out=folder, devices=1)
    before = sorted(path.name for path in tmp_path.iterdir())
    large = SPEC | {"train": {"steps": 3, "global_batch": 10_000}}
    with pytest.raises(ConfigError, match="1437 training samples"):
        pr.check(large)
    with pytest.raises(ConfigError, match="1437 training samples"):
        pr.train(large, out=folder, devices=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (folder / "summary.json").exists()


def test_a_plan_for_another_model_is_one_sentence(tmp_path):
    pr.plan(SPEC, assume=True, cluster="preset:1xCPU", out=tmp_path / "plan.json")
    other = SPEC | {"model": {"kind": "mlp", "hidden": [8, 8]}}
    with pytest.raises(ConfigError) as raised:
        pr.check(other, plan=tmp_path / "plan.json", devices=1)
    (violation,) = raised.value.violations
    assert violation.rule.startswith("was made for another graph")


@pytest.mark.parametrize("made_for", [8, 32])
def test_a_profile_measured_for_another_batch_is_refused_with_what_to_do(toy, made_for):
    """One made for a larger batch was taken as if it had been made for this one."""
    profile = pr.profile(SPEC, assume=True, devices=1)
    assert pr.plan(SPEC, profile=profile, devices=1)  # assumed costs hold for any batch
    measured = msgspec.structs.replace(profile, global_batch=made_for, assumed=False)
    with pytest.raises(ConfigError) as raised:
        pr.plan(SPEC, profile=measured, devices=1)
    (violation,) = raised.value.violations
    assert violation.path == "--profile"
    assert violation.rule == f"batch: made for a global batch of {made_for}, wanted 16"
    assert "measure again: polyreme profile" in violation.legal
    assert "--assume" in violation.legal
    same = msgspec.structs.replace(measured, global_batch=16)
    assert not pr.plan(SPEC, profile=same, devices=1)[0].assumed


@pytest.mark.parametrize("wanted", [True, False])
def test_a_profile_of_layers_that_run_otherwise_is_refused_with_what_to_do(toy, wanted):
    """Compiled layers were priced by times of layers that are not."""
    spec = SPEC | {"train": SPEC["train"] | {"compile": wanted}}
    profile = pr.profile(spec, assume=True, devices=1)
    for compiled in (True, False):  # assumed costs hold for either
        assert pr.plan(spec, profile=msgspec.structs.replace(profile, compiled=compiled), devices=1)
    made = msgspec.structs.replace(profile, global_batch=16, assumed=False, compiled=not wanted)
    with pytest.raises(ConfigError) as raised:
        pr.plan(spec, profile=made, devices=1)
    (violation,) = raised.value.violations
    assert violation.path == "--profile"
    assert violation.rule.startswith("compile: made of layers that are ")
    assert violation.rule.endswith(f"(train.compile = {str(wanted).lower()})")
    assert "measure again: polyreme profile" in violation.legal
    same = msgspec.structs.replace(made, compiled=wanted)
    assert not pr.plan(spec, profile=same, devices=1)[0].assumed


@pytest.mark.parametrize("n_devices", [1, 2, 3])
def test_plan_and_train_use_the_devices_that_were_asked_for(toy, n_devices):
    profile = pr.profile(SPEC, assume=True, devices=n_devices)
    (best, *_) = pr.plan(SPEC, profile=profile, devices=n_devices)
    assert len(best.order) == n_devices
    assert best.search.unused_devices == ()


def test_a_run_that_diverges_still_leaves_summary_and_report(toy, tmp_path):
    rate = {"rule": {"kind": "SGD", "lr": 1e37}}
    summary = pr.train(SPEC | {"data_parallel": rate}, out=tmp_path / "run", devices=1)
    assert summary.metrics["heldout_loss"] is None
    assert (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "run" / "report.html").exists()


def test_an_error_of_the_ranks_is_not_hidden_by_the_record_of_it(toy, tmp_path):
    whole = SPEC | {"train": {"steps": 3, "global_batch": 10_000}}
    with pytest.raises(ConfigError, match="more than the 1437 training samples"):
        pr.train(whole, out=tmp_path / "run", devices=1)


def test_a_plan_is_written_into_a_folder_that_is_not_there_yet(tmp_path):
    pr.plan(SPEC, assume=True, cluster="preset:1xH100", out=tmp_path / "a" / "b" / "plan.json")
    assert (tmp_path / "a" / "b" / "plan.json").exists()
