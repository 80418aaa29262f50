"""The constant of a partition that runs of linear models end with."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from both_clocks import constants_in_processes, constants_on_the_clock
from finite_sums import ELASTIC, L2, Case, Problem
from polyreme import api
from polyreme.algo.sync import PSCOPE
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.shard import Shard
from polyreme.convex.task import LinearTask
from polyreme.data.rows import Rows
from polyreme.runtime import linear

torch.set_num_threads(1)
CUTS = {"even": (40, 80), "uneven": (20, 95)}
CLASSES = 'partition = { kind = "classes", per_worker = 1 }'
SPEC = """
[model]
kind = "linear"
l2 = 1e-3
{model}
[data]
kind = "svmlight"
path = "{path}"
heldout = 0.0
{data}
[train]
steps = 400
gap = 1e-7
global_batch = 4
{train}
[data_parallel]
sync = {{ kind = "pSCOPE" }}
[simulate]
workers = 2
[cluster]
cpu_processes = 2
"""


def _spec(path: Path, *, model: str = "", data: str = "", train: str = "") -> dict[str, Any]:
    return tomllib.loads(SPEC.format(path=path, model=model, data=data, train=train))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Features are 0 or 1, so that a class has rows that the other's are unlike."""
    rng = np.random.default_rng(0)
    x = rng.random((400, 8)) < 0.4
    y = np.where((x - 0.4) @ rng.normal(size=8) + 0.3 * rng.normal(size=400) > 0, 1, -1)
    lines = [
        f"{label} " + " ".join(f"{j + 1}:1" for j in np.flatnonzero(row))
        for row, label in zip(x, y, strict=True)
    ]
    path = tmp_path / "rows.svm"
    path.write_text("\n".join(lines) + "\n")
    return path


def _constants(problem: Problem, cuts: tuple[int, ...], w: np.ndarray) -> tuple[Any, ...]:
    x, y = problem.data
    tasks = {
        rank: LinearTask(
            shard=Shard(objective=problem.objective, rows=Rows.of(x[part]), y=y[part]), batch=16
        )
        for rank, part in enumerate(np.split(np.arange(problem.n), cuts))
    }
    alone = cast("Any", type("World", (), {"group": None}))
    return linear.anchors(cast("Any", tasks), cast("Any", None), alone, torch.from_numpy(w), 0)


def _exact(problem: Problem, cuts: tuple[int, ...], w: np.ndarray, at: float) -> float:
    """l(a) / |a - w|^2 by scipy, on dense rows; |u|_1 as the sum of two parts of u."""
    x, y = problem.data
    penalty, d = problem.objective.penalty, problem.n_features

    def gradient(which: slice | np.ndarray, u: np.ndarray) -> np.ndarray:
        p = y[which] * (x[which] @ u)
        return -(y[which] / (1 + np.exp(p))) @ x[which] / len(p)

    anchor, total = at * w, 0.0
    for part in np.split(np.arange(problem.n), cuts):
        tilt = gradient(slice(None), anchor) - gradient(part, anchor)

        def value(v: np.ndarray, part: np.ndarray = part, tilt: np.ndarray = tilt) -> Any:
            u = v[:d] - v[d:]
            loss = np.logaddexp(0, -y[part] * (x[part] @ u)).mean()
            slope = gradient(part, u) + tilt + penalty.l2 * u
            whole = loss + tilt @ u + penalty.l2 / 2 * u @ u + penalty.l1 * v.sum()
            return whole, np.concatenate([slope, -slope]) + penalty.l1

        bounds = [(0, None)] * (2 * d)
        options = {"maxiter": 20_000, "maxfun": 100_000, "ftol": 1e-15, "gtol": 1e-10}
        found = minimize(value, np.zeros(2 * d), jac=True, bounds=bounds, options=options)
        total += len(part) / problem.n * found.fun
    return float((problem.value(w) - total) / ((anchor - w) @ (anchor - w)))


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("penalty", [L2, ELASTIC], ids=["l2", "elastic"])
def test_what_is_called_a_bound_from_below_is_one_and_not_far_off(
    penalty: Penalty, sort: bool, cuts: str
) -> None:
    problem = Problem(Objective(penalty=penalty), seed=5, sort=sort)
    w = problem.best
    found = _constants(problem, CUTS[cuts], w)
    assert [each.at for each in found] == [0.0, 0.5]
    for each in found:
        exact = _exact(problem, CUTS[cuts], w, each.at)
        assert 0.2 * exact < each.constant <= exact * (1 + 1e-6)
        assert each.distance == pytest.approx((1 - each.at) * np.linalg.norm(w))
        assert each.promised >= 1
    fall = problem.value(0 * w) - problem.value(w)
    first = found[0]
    # P(a) - sum = l(a) + P(a) - P(w)
    assert first.promised == pytest.approx(1 + first.constant * first.distance**2 / fall, rel=1e-6)


def test_a_model_that_is_far_from_the_optimum_claims_nothing_of_the_optimum() -> None:
    problem = Problem(seed=5, sort=True)
    near, far = problem.best, problem.best + 3.0
    exact = _exact(problem, CUTS["even"], near, 0.0) * (near @ near)
    first = _constants(problem, CUTS["even"], far)[0]
    assert first.constant * first.distance**2 <= exact
    fall = problem.value(0 * near) - problem.value(near)
    assert 1 <= first.promised <= 1 + exact / fall


def test_short_of_the_optimum_claims_are_bounds_too() -> None:
    problem = Problem(seed=6, sort=True)
    best = problem.best
    exact = _exact(problem, CUTS["even"], best, 0.0) * (best @ best)
    fall = problem.value(0 * best) - problem.value(best)
    for share in (0.9, 0.99, 0.999):
        first = _constants(problem, CUTS["even"], share * best)[0]
        assert first.constant * first.distance**2 <= exact
        assert 1 <= first.promised <= 1 + exact / fall


def test_a_model_of_zeros_has_no_anchors() -> None:
    problem = Problem(Objective(penalty=Penalty(l1=10.0)))
    assert _constants(problem, CUTS["even"], np.zeros(problem.n_features)) == ()


@pytest.mark.parametrize(("scale", "n"), [(1e100, 2), (1e200, 0)])
def test_rows_that_are_too_large_to_step_on_claim_nothing(scale: float, n: int) -> None:
    problem = Problem(seed=5, sort=True)
    problem.data[0][:, 3] *= scale
    with np.errstate(over="ignore"):
        found = _constants(problem, CUTS["even"], np.full(problem.n_features, 0.1 / scale))
    assert [each.constant for each in found] == [0.0] * n


def test_classes_apart_have_a_far_larger_constant_than_rows_dealt_at_random(
    rows: Path, tmp_path: Path
) -> None:
    iid = api.simulate(_spec(rows), out=tmp_path / "iid")
    apart = api.simulate(_spec(rows, data=CLASSES), out=tmp_path / "apart")
    assert iid.partition is not None
    assert apart.partition is not None
    assert apart.partition.constant > 20 * iid.partition.constant > 0
    kept = json.loads((tmp_path / "apart" / "summary.json").read_text())["partition"]
    assert kept["constant"] == apart.partition.constant
    assert api.run_json(tmp_path / "apart")["partition"]["constant"] == apart.partition.constant
    page = (tmp_path / "apart" / "report.html").read_text()
    assert "rows differ much" in page
    assert "Partition constant: at least" in page


@pytest.mark.parametrize("sort", [False, True])
def test_processes_measure_what_the_clock_does(sort: bool, pool: Any) -> None:
    case = Case(PSCOPE(), 3, Problem(sort=sort), steps=12)
    virtual = pool(1).run(constants_on_the_clock, case, 3)[0]
    for real in pool(3).run(constants_in_processes, case):
        for ours, theirs in zip(real, virtual, strict=True):
            assert ours.at == theirs.at
            assert ours.constant == pytest.approx(theirs.constant, rel=1e-9, abs=1e-15)
            assert ours.promised == pytest.approx(theirs.promised, rel=1e-9)
    assert virtual[0].constant > 0


@pytest.mark.long
def test_processes_of_a_command_say_the_constants_that_simulate_says(
    rows: Path, tmp_path: Path
) -> None:
    for name, data in (("iid", ""), ("apart", CLASSES)):
        spec = _spec(rows, data=data)
        virtual = api.simulate(spec, out=tmp_path / f"{name}-virtual").partition
        real = api.train(spec, out=tmp_path / f"{name}-real", devices=2).partition
        assert virtual is not None
        assert real is not None
        assert real.constant == pytest.approx(virtual.constant, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("", ["report.partition=false"]),
        ("", ["simulate.workers=1"]),
        ("group_l1 = 1e-3\ngroup_size = 2", []),
    ],
    ids=["off", "one-worker", "groups"],
)
def test_nothing_is_measured_where_it_is_not_asked_for_or_means_nothing(
    rows: Path, tmp_path: Path, model: str, overrides: list[str]
) -> None:
    found = api.simulate(_spec(rows, model=model), out=tmp_path / "run", overrides=overrides)
    assert found.status == "done"
    assert found.partition is None
    assert "Partition constant" not in (tmp_path / "run" / "report.html").read_text()


def test_a_run_without_a_penalty_ends_as_before(rows: Path, tmp_path: Path) -> None:
    spec = _spec(rows)
    spec["model"]["l2"], spec["train"] = 0.0, {"steps": 3, "global_batch": 4}
    assert api.simulate(spec, out=tmp_path / "run").partition is None


def test_a_constant_of_an_earlier_model_does_not_stand_for_a_later_one(
    rows: Path, tmp_path: Path
) -> None:
    spec = _spec(rows)
    del spec["train"]["gap"]
    first = api.simulate(spec, out=tmp_path / "run", overrides=["train.steps=3"])
    assert first.partition is not None
    more = ["train.steps=5", "report.partition=false"]
    found = api.simulate(spec, out=tmp_path / "run", overrides=more, resume="auto")
    assert found.steps == 5
    assert found.partition is None
