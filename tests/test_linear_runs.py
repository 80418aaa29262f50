"""Runs of linear models from a spec and a file: what is refused, what ends them, what they say."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyreme import api, linear
from polyreme.data.svmlight_text import read
from polyreme.errors import ConfigError

torch.set_num_threads(1)

SPEC = """
[model]
kind = "linear"
{model}
[data]
kind = "svmlight"
path = "{path}"
heldout = 0.0
{data}
[data_parallel]
{parallel}
[train]
steps = {steps}
global_batch = {workers}
{train}
[simulate]
workers = {workers}
"""


def _spec(path, *, model="l1 = 1e-2", data="", parallel="", train="", steps=40, workers=2):
    parallel = parallel or 'sync = { kind = "pSCOPE" }'
    text = SPEC.format(
        model=model,
        path=path,
        data=data,
        parallel=parallel,
        train=train,
        steps=steps,
        workers=workers,
    )
    return tomllib.loads(text)


def _write(path: Path, rows: np.ndarray, y: np.ndarray) -> Path:
    lines = []
    for row, label in zip(rows, y, strict=True):
        pairs = " ".join(f"{j + 1}:{v!r}" for j, v in enumerate(row.tolist()) if v)
        lines.append(f"{label:g} {pairs}".rstrip())
    path.write_text("\n".join(lines) + "\n")
    return path


def _drawn(seed: int, n: int = 60, d: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = (rng.random((n, d)) < 0.5) * rng.normal(size=(n, d))
    y = np.where(rows @ rng.normal(size=d) + 0.3 * rng.normal(size=n) > 0, 1.0, -1.0)
    return rows, y


def test_labels_of_three_classes_are_refused_by_the_line_of_the_third(tmp_path: Path) -> None:
    path = tmp_path / "three.svm"
    path.write_text("1 1:1\n-1 2:1\n1 1:2\n0 2:2\n")
    with pytest.raises(ConfigError, match=r"three\.svm, line 4"):
        api.simulate(_spec(path), out=tmp_path / "run")


def test_one_class_against_the_rest_is_trained_on_its_own_labels(tmp_path: Path) -> None:
    rows, y = _drawn(1)
    path = _write(tmp_path / "a.svm", rows, np.where(y > 0, np.arange(len(y)) % 2 + 1, 0))
    spec = _spec(path, data="positive = 0", train="gap = 1e-9")
    found = api.simulate(spec, out=tmp_path / "run")
    best = linear.fit(rows, np.where(y > 0, -1, 1), l1=1e-2, tol=1e-12)
    assert found.metrics["objective"] == pytest.approx(best.objective, abs=2e-9)


@pytest.mark.parametrize("value", ["nan", "inf", "x"])
def test_a_value_that_is_no_number_is_refused_by_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "bad.svm"
    path.write_text(f"1 1:1\n-1 2:{value}\n")
    with pytest.raises(ConfigError, match=r"bad\.svm, line 2"):
        api.simulate(_spec(path), out=tmp_path / "run")


def test_a_worker_without_rows_is_named(tmp_path: Path) -> None:
    rows, _ = _drawn(2, n=3)
    path = _write(tmp_path / "few.svm", rows, np.array([1.0, -1.0, 1.0]))
    spec = _spec(path, train='tail = "wrap"', workers=4)
    with pytest.raises(ConfigError, match="worker 3 of 4 without samples"):
        api.simulate(spec, out=tmp_path / "run")


def test_empty_rows_and_a_feature_that_nobody_has_change_nothing_else(tmp_path: Path) -> None:
    rows, y = _drawn(3)
    rows[::7] = 0.0
    rows[:, 2] = 0.0
    found = api.simulate(
        _spec(_write(tmp_path / "a.svm", rows, y), train="gap = 1e-9"), out=tmp_path / "run"
    )
    best = linear.fit(rows, y, l1=1e-2, tol=1e-12)
    weights = load_file(tmp_path / "run" / "final.safetensors")["linear.weight"].numpy()
    assert found.metrics["objective"] == pytest.approx(best.objective, abs=2e-9)
    assert weights[2] == 0.0
    assert np.abs(weights - best.w).max() < 1e-3


def test_classes_that_are_each_on_one_worker_come_to_the_optimum_too(tmp_path: Path) -> None:
    rows, y = _drawn(4)
    path = _write(tmp_path / "a.svm", rows, y)
    spec = _spec(
        path,
        data='partition = { kind = "classes", per_worker = 1 }',
        train="gap = 1e-7",
        steps=3000,
        model="l2 = 0.1",
    )
    found = api.simulate(spec, out=tmp_path / "run")
    best = linear.fit(rows, y, l2=0.1, tol=1e-12)
    assert found.metrics["objective"] == pytest.approx(best.objective, abs=2e-7)


def test_a_value_of_1e30_ends_with_a_gap_that_says_how_far_it_is(tmp_path: Path) -> None:
    rows, y = _drawn(5)
    rows[0, 0] = 1e30
    path = _write(tmp_path / "a.svm", rows, y)
    found = api.simulate(_spec(path, train="gap = 1e-9"), out=tmp_path / "run")
    ((read_rows, read_y),) = read([path], None)
    best = linear.fit(read_rows, read_y, l1=1e-2, tol=1e-6)
    assert found.steps == 40
    assert found.metrics["objective"] - found.metrics["gap"] <= best.objective


def test_the_gap_that_is_asked_for_ends_the_run_and_is_a_bound(tmp_path: Path) -> None:
    rows, y = _drawn(6)
    path = _write(tmp_path / "a.svm", rows, y)
    found = api.simulate(_spec(path, train="gap = 1e-6"), out=tmp_path / "run")
    assert found.status == "done"
    assert found.steps < 40
    best = linear.fit(rows, y, l1=1e-2, tol=1e-13).objective
    events = map(json.loads, (tmp_path / "run" / "log.jsonl").read_text().splitlines())
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == found.steps
    assert all(-1e-12 <= each["objective"] - best <= each["gap"] + 1e-12 for each in steps)
    assert steps[-1]["gap"] <= 1e-6 < steps[-2]["gap"]


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.svm", *_drawn(7))
    spec = _spec(path, train="checkpoint_every = 3", steps=7)
    api.simulate(spec, out=tmp_path / "whole")
    short = _spec(path, train="checkpoint_every = 3", steps=3)
    api.simulate(short, out=tmp_path / "part")
    resumed = tmp_path / "part" / "checkpoints" / "step-3"
    api.simulate(spec, out=tmp_path / "rest", resume=str(resumed))
    one, other = (load_file(tmp_path / name / "final.safetensors") for name in ("whole", "rest"))
    assert torch.equal(one["linear.weight"], other["linear.weight"])


@pytest.mark.parametrize(
    ("model", "parallel", "train", "said"),
    [
        ("", "", "gap = 1e-6", "train.gap: 1e-06 cannot be known without a penalty"),
        ("l1 = 1e-3", "", 'precision = "bf16"', "train.precision"),
        ("l1 = 1e-3", 'sync = { kind = "SCOPE" }', "", "takes gradients of the penalty"),
        ("l1 = 1e-3", 'rule = { kind = "SGD" }', "", "leaves the l1 of the model out"),
    ],
)
def test_what_does_not_fit_a_linear_model_is_refused(
    tmp_path: Path, model: str, parallel: str, train: str, said: str
) -> None:
    path = _write(tmp_path / "a.svm", *_drawn(8))
    with pytest.raises(ConfigError, match=said):
        api.simulate(_spec(path, model=model, parallel=parallel, train=train), out=tmp_path / "run")


def test_a_gap_or_a_whole_sum_is_refused_for_other_models(tmp_path: Path) -> None:
    text = """
        [model]
        kind = "mlp"
        [data]
        kind = "digits"
        [train]
        steps = 2
        gap = 1e-3
        [data_parallel]
        sync = { kind = "pSCOPE" }
        """
    with pytest.raises(ConfigError) as caught:
        api.simulate(tomllib.loads(text), out=tmp_path / "run")
    assert {each.path for each in caught.value.violations} == {
        "data_parallel.sync.kind",
        "train.gap",
    }
