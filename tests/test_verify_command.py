"""`polyreme verify` and `pr.verify`: what they say, exit with, and take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import polyreme as pr
from devices import TWO
from polyreme import api, cli
from polyreme.api.verifying import Verification
from polyreme.errors import ConfigError
from polyreme.plan import store

SPEC = {
    "model": {"kind": "mlp", "hidden": [16]},
    "data": {"kind": "digits"},
    "train": {"steps": 9, "global_batch": 15, "precision": "bf16", "clip_norm": 0.5},
    "parallel": {"shard": 2, "level": "params", "microbatch": 4},
}
LEVELS = ("none", "optimizer", "grads", "params")
EXAMPLES = Path(__file__).parents[1] / "examples"
FAILED = Verification(
    passed=False,
    dtype="float64",
    steps=2,
    max_loss_error=1e-16,
    max_grad_error=0.5,
    max_parameter_error=0.0,
    first_parameter="head.weight",
    difference="in step 2 the gradient of head.weight differs by 5.0e-01 on rank 1",
    tolerance=1e-9,
    loss_tolerance=1e-9,
    plan="2 replicas, 1 microbatch",
)


@pytest.mark.parametrize("json_", [True, False])
def test_a_failed_verification_exits_1_and_names_the_parameter(monkeypatch, tmp_path, json_):
    monkeypatch.setattr(api, "verify", lambda *_, **__: FAILED)
    arguments = ["verify", "spec.toml", *(["--json"] if json_ else [])]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "verification failed: in step 2 the gradient of head.weight" in result.stderr
    if json_:
        found = json.loads(result.stdout)
        assert found["passed"] is False
        assert found["first_parameter"] == "head.weight"


def test_a_passed_one_exits_0_with_the_contract_s_names(monkeypatch):
    passed = msgspec.structs.replace(FAILED, passed=True, first_parameter=None, difference=None)
    monkeypatch.setattr(api, "verify", lambda *_, **__: passed)
    result = CliRunner().invoke(cli.app, ["verify", "spec.toml", "--json"])
    assert result.exit_code == 0
    names = "passed dtype max_loss_error max_grad_error first_parameter tolerance plan"
    assert set(names.split()) <= set(json.loads(result.stdout))


@TWO
def test_the_plan_that_training_would_choose_passes_and_writes_nothing(monkeypatch, tmp_path, warm):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = pr.verify(SPEC, devices=2, steps=2)
    assert found is not None
    assert found.passed, found.difference
    assert (found.steps, found.dtype) == (2, "float64")
    assert found.plan == "2 shards (params), 2 microbatches of up to 4 samples"
    assert 0 < found.max_grad_error < 1e-12
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@TWO
def test_asked_to_end_a_verification_ends_at_once(tmp_path):
    """There is nothing to save, so no rank is waited for."""
    command = [sys.executable, "-m", "polyreme", "verify", str(EXAMPLES / "digits.toml")]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    job = subprocess.Popen(
        [
            *command,
            "--devices",
            "2",
            "--steps",
            "100000",
            "--set",
            "train.epochs=9999",
            "--set",
            "model={kind='mlp', hidden=[16]}",
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = []
    try:
        assert job.stderr is not None
        for line in job.stderr:
            said.append(line)
            if "beside it" in line:
                break
        time.sleep(1)  # into the steps
        job.send_signal(signal.SIGINT)
        code = job.wait(20)
        assert code == 130, [*said, *job.stderr]
    finally:
        job.kill()


@TWO
def test_a_plan_of_another_model_is_refused(tmp_path):
    other = {**SPEC, "model": {"kind": "mlp", "hidden": [8]}}
    file = tmp_path / "plan.json"
    store.save(pr.plan(other, assume=True, devices=2)[0], file)
    with pytest.raises(ConfigError):
        pr.verify(SPEC, devices=2, plan=file)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "shard", "level"),
    [
        (1, 1, "none"),  # alone a device has nothing to shard
        *((*split, level) for split in ((2, 2), (4, 2), (4, 4)) for level in LEVELS),
    ],
)
@pytest.mark.parametrize("name", ["quickstart", "digits"])
def test_an_example_passes_under_every_level(name, devices, shard, level):
    fixed = [f"parallel.shard={shard}", f"parallel.replica={devices // shard}"]
    fixed += [f'parallel.level="{level}"']
    found = pr.verify(EXAMPLES / f"{name}.toml", overrides=fixed, devices=devices)
    assert found is not None
    assert found.passed, found.difference
