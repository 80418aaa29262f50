"""What ends a run of a linear model: the model that is kept is as good as was asked for."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.optimize import check_grad

from both_clocks import in_processes, on_the_clock
from finite_sums import ELASTIC, GROUPS, L1, L2, MEMBERS, Case, Problem, prox, slopes
from polyreme import api
from polyreme.algo.goal import Goal
from polyreme.algo.sync import DANE, DSVRG, PSCOPE, SCOPE
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.shard import Shard
from polyreme.data.rows import Rows
from polyreme.errors import ConfigError

torch.set_num_threads(1)

CERTIFYING = [kind for kind in MEMBERS if kind.certifies]
certifying = pytest.mark.parametrize("kind", CERTIFYING, ids=lambda kind: kind.__name__)
LINEAR = """
[model]
kind = "linear"
{model}
[data]
kind = "svmlight"
path = "{path}"
heldout = 0.0
[data_parallel]
{parallel}
[train]
steps = {steps}
global_batch = 2
{train}
[simulate]
workers = 2
"""


def _gap(problem: Problem, w: np.ndarray) -> float:
    x, y = problem.data
    return Shard(objective=problem.objective, rows=Rows.of(x), y=y).certificate(w).gap


def _residual(problem: Problem, w: np.ndarray) -> float:
    """The largest entry of w - prox(w - g), of dense rows."""
    x, y = problem.data
    g = x.T @ slopes(problem.objective, x @ w, y) / problem.n
    return float(np.abs(w - prox(w - g, 1.0, problem.objective.penalty)).max())


def _written(path: Path, problem: Problem) -> Path:
    with path.open("w") as file:
        for row, label in zip(*problem.data, strict=True):
            pairs = " ".join(f"{j + 1}:{v!r}" for j, v in enumerate(row.tolist()) if v)
            file.write(f"{label:g} {pairs}".rstrip() + "\n")
    return path


def _spec(path: Path, *, model: str, train: str, parallel: str = "", steps: int = 60) -> Any:
    parallel = parallel or 'sync = { kind = "pSCOPE" }'
    text = LINEAR.format(path=path, model=model, train=train, parallel=parallel, steps=steps)
    return tomllib.loads(text)


def _model(penalty: Penalty) -> str:
    names = ("l1", "l2", "group_l1", "group_size")
    return "\n".join(f"{name} = {getattr(penalty, name)!r}" for name in names)


@pytest.mark.slice(1)
@certifying
def test_the_model_that_is_kept_is_within_the_gap_on_both_clocks(kind: type, pool: Any) -> None:
    case = Case(kind(), 3, Problem(), steps=400, gap=1e-5)
    real, steps, _ = pool(3).run(in_processes, case)[0]
    virtual, _ = pool(1).run(on_the_clock, case, 3)[0]
    assert torch.equal(real["linear.weight"], virtual["linear.weight"])
    assert steps < case.steps
    kept = real["linear.weight"].numpy()
    assert _gap(case.problem, kept) <= 1e-5 * (1 + 1e-9)
    before, *_ = pool(3).run(in_processes, case.more(gap=None, steps=steps - 1))[0]
    assert torch.equal(before["linear.weight"], real["linear.weight"])  # no move at the last


@pytest.mark.parametrize(
    ("sync", "penalty"),
    [
        (PSCOPE(), Penalty()),
        (PSCOPE(), L1),
        (PSCOPE(), ELASTIC),
        (PSCOPE(), GROUPS),
        (SCOPE(), Penalty()),
        (SCOPE(), L2),
        (DANE(), L1),
        (DSVRG(), L2),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, Penalty) else str(each),
)
def test_the_model_that_is_kept_is_within_the_gradient_norm(
    tmp_path: Path, sync: Any, penalty: Penalty
) -> None:
    problem = Problem(Objective(penalty=penalty), seed=3)
    path = _written(tmp_path / "a.svm", problem)
    name = sync.__struct_config__.tag
    spec = _spec(
        path,
        model=_model(penalty),
        train="gradient_norm = 1e-5",
        parallel=f'sync = {{ kind = "{name}" }}',
        steps=400,
    )
    found = api.simulate(spec, out=tmp_path / "run")
    w = load_file(tmp_path / "run" / "final.safetensors")["linear.weight"].numpy()
    assert found.status == "done"
    assert 1 < found.steps < 400
    assert _residual(problem, w.reshape(-1)) <= 1e-5 * (1 + 1e-9)
    assert found.metrics["gradient"] == pytest.approx(_residual(problem, w.reshape(-1)), rel=1e-6)


def test_without_a_penalty_the_gradient_that_ends_a_run_is_the_whole_one() -> None:
    problem = Problem(Objective(penalty=Penalty()), seed=3)
    x, y = problem.data
    rng = np.random.default_rng(0)
    w = rng.normal(size=problem.n_features)
    gradient = lambda w: x.T @ slopes(problem.objective, x @ w, y) / problem.n  # noqa: E731
    assert check_grad(problem.value, gradient, w) < 1e-6
    shard = Shard(objective=problem.objective, rows=Rows.of(x), y=y)
    assert shard.certificate(w).gradient == pytest.approx(np.abs(gradient(w)).max(), rel=1e-12)


@pytest.mark.parametrize("parallel", ['sync = { kind = "CoCoA" }', 'sync = { kind = "ADMM" }'])
def test_where_rounds_know_no_gradient_evaluations_end_the_run(
    tmp_path: Path, parallel: str
) -> None:
    problem = Problem(seed=5)  # CoCoA's rounds have one that is always 0: that of the dual
    path = _written(tmp_path / "a.svm", problem)
    train = "gradient_norm = 1e-4\neval_every = 5"
    spec = _spec(path, model=_model(L2), train=train, parallel=parallel, steps=1000)
    found = api.simulate(spec, out=tmp_path / "run")
    w = load_file(tmp_path / "run" / "final.safetensors")["linear.weight"].numpy()
    assert found.steps % 5 == 0
    assert 5 < found.steps < 1000
    assert _residual(problem, w.reshape(-1)) <= 1e-4 * (1 + 1e-9)


def test_of_two_ends_the_first_that_is_met_is_enough() -> None:
    both = Goal(gap=1e-3, gradient_norm=1e-6)
    assert both.met(1e-3, None)
    assert both.met(float("inf"), 1e-6)
    assert not both.met(2e-3, 2e-6)
    assert not both.met(None, None)
    assert not both.met(float("nan"), float("nan"))
    assert not Goal().met(0.0, 0.0)


def test_a_run_that_goes_on_from_where_it_ended_moves_no_further(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.svm", Problem(seed=6))
    spec = _spec(path, model=_model(L2), train="gap = 1e-6")
    first = api.simulate(spec, out=tmp_path / "one")
    newest = tmp_path / "one" / "checkpoints" / f"step-{first.steps}"
    again = api.simulate(spec, out=tmp_path / "two", resume=str(newest))
    one, two = (load_file(tmp_path / name / "final.safetensors") for name in ("one", "two"))
    assert torch.equal(one["linear.weight"], two["linear.weight"])
    assert again.steps == first.steps + 1


@pytest.mark.parametrize("train", ["gap = 1e-6", "gradient_norm = 1e-6"])
def test_the_step_that_ended_the_run_is_logged_whatever_is_left_out(
    tmp_path: Path, train: str
) -> None:
    path = _written(tmp_path / "a.svm", Problem(seed=7))
    spec = _spec(path, model=_model(ELASTIC), train=f"{train}\nlog_every = 1000")
    found = api.simulate(spec, out=tmp_path / "run")
    log = (tmp_path / "run" / "log.jsonl").read_text()
    (event,) = (line for line in log.splitlines() if '"kind":"step"' in line)
    step = json.loads(event)
    assert step["step"] == found.steps
    name = train.split()[0]
    assert step["gap" if name == "gap" else "gradient"] <= 1e-6
    assert step["passes"] >= 1
    assert step["lr"] > 0


@pytest.mark.parametrize("penalty", [L2, L1], ids=["l2", "l1"])
def test_a_gradient_norm_of_nothing_is_refused(tmp_path: Path, penalty: Penalty) -> None:
    path = _written(tmp_path / "a.svm", Problem())
    with pytest.raises(ConfigError, match=r"train\.gradient_norm"):
        api.simulate(
            _spec(path, model=_model(penalty), train="gradient_norm = 0.0"), out=tmp_path / "run"
        )


def test_a_gradient_norm_is_refused_where_no_whole_sum_is_seen(tmp_path: Path) -> None:
    text = """
        [model]
        kind = "mlp"
        [data]
        kind = "digits"
        [train]
        steps = 2
        gradient_norm = 1e-3
        """
    with pytest.raises(ConfigError) as caught:
        api.simulate(tomllib.loads(text), out=tmp_path / "run")
    assert [each.path for each in caught.value.violations] == ["train.gradient_norm"]
