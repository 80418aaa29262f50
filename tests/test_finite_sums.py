"""Syncs of linear models: every one of them reaches the optimum, however it is dealt out."""

from __future__ import annotations

import io
import math
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from both_clocks import in_processes, on_the_clock
from finite_sums import (
    ELASTIC,
    GROUPS,
    L1,
    L2,
    MEMBERS,
    SILENT,
    Case,
    Problem,
    Run,
    folder,
    form,
    takes,
)
from polyreme.algo.sync import ADMM, DANE, DSVRG, OWLQN, PSCOPE, SCOPE, BlockCoordinate, CoCoA
from polyreme.algo.task import Steps
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.task import LinearTask
from polyreme.errors import ConfigError

PENALTIES = {"l2": L2, "elastic": ELASTIC, "l1": L1, "groups": GROUPS}
members = pytest.mark.parametrize("kind", MEMBERS, ids=lambda kind: kind.__name__)
fitting = pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, id=f"{kind.__name__}-{name}")
        for kind in MEMBERS
        for name, penalty in PENALTIES.items()
        if takes(kind, penalty)
    ],
)
OPTIONS: dict[str, Any] = {
    "SCOPE-mean": SCOPE(send="mean"),
    "SCOPE-pull": SCOPE(c=0.1),
    "pSCOPE-mean": PSCOPE(send="mean"),
    "pSCOPE-set": PSCOPE(eta=0.1, passes=3),
    "DSVRG-mean": DSVRG(send="mean"),
    "DANE-mu": DANE(mu=0.1, anchors=1, passes=4),
    "DANE-eta": DANE(eta=0.1),
    "CoCoA-passes": CoCoA(passes=3),
    "CoCoA-part": CoCoA(passes=0.3),
    "ADMM-rho": ADMM(rho=0.02, relax=1.0),
    "ADMM-eta": ADMM(eta=100.0, anchors=4),
    "blocks-drawn": BlockCoordinate(order="random", blocks=4),
    "blocks-one": BlockCoordinate(blocks=1),
    "blocks-coloured": BlockCoordinate(independent=True),
    "OWLQN-short": OWLQN(memory=1),
}


def _near(problem: Problem, within: float = 1e-8) -> typing.Callable[[np.ndarray], bool]:
    return lambda w: bool(np.abs(w - problem.best).max() <= within)


@fitting
@pytest.mark.parametrize("n", [1, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 8)), 4])
def test_every_member_reaches_the_weights_of_the_optimum(kind: type, name: str, n: int) -> None:
    problem = Problem(Objective(penalty=PENALTIES[name]))
    assert Run(kind(), problem.team(n)).until(_near(problem), 1500) > 0


@pytest.mark.slice(5)
@members
@pytest.mark.parametrize("loss", ["squared_hinge", "hinge", "squared"])
def test_every_member_reaches_the_optimum_of_other_losses(kind: type, loss: Any) -> None:
    problem = Problem(Objective(loss=loss, penalty=L2), seed=1)
    assert Run(kind(), problem.team(4)).until(_near(problem), 1500) > 0


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_the_way_and_not_where_it_leads(name: str) -> None:
    problem = Problem(seed=2)
    assert Run(OPTIONS[name], problem.team(4)).until(_near(problem), 1500) > 0


def test_the_optimum_that_all_are_held_to_is_that_of_scikit_learn() -> None:
    for name in ("l2", "elastic"):
        penalty = PENALTIES[name]
        problem = Problem(Objective(penalty=penalty))
        total = penalty.l1 + penalty.l2
        theirs = LogisticRegression(
            C=1 / (problem.n * total),
            l1_ratio=penalty.l1 / total,
            solver="saga" if penalty.l1 else "newton-cholesky",
            tol=1e-13,
            max_iter=100_000,
            fit_intercept=False,
        ).fit(*problem.data)
        np.testing.assert_allclose(problem.best, theirs.coef_[0], atol=1e-9)


@members
@pytest.mark.parametrize("n", [2, 4])
def test_workers_of_one_class_reach_it_too(kind: type, n: int) -> None:
    problem = Problem(sort=True)
    assert Run(kind(), problem.team(n)).until(_near(problem, 1e-6), 1500) > 0


@members
def test_a_feature_that_no_row_has_is_never_moved(kind: type) -> None:
    problem = Problem(Objective(penalty=ELASTIC if takes(kind, ELASTIC) else L2))
    run = Run(kind(), problem.team(3))
    for _ in range(20):
        assert run.round()[SILENT] == 0.0
    assert np.count_nonzero(run.states[0]["params"]) >= problem.n_features - 4


@fitting
def test_a_gap_is_above_what_is_missing_at_every_round(kind: type, name: str) -> None:
    problem = Problem(Objective(penalty=PENALTIES[name]), seed=3)
    run = Run(kind(), problem.team(3))
    for _ in range(40):
        run.round()
    least = problem.value(problem.best)
    for record in run.records:
        assert (record.gap is not None) == (record.objective is not None) == kind.certifies
        if kind.certifies:
            missing = record.objective - least
            assert -1e-14 <= missing <= record.gap + 1e-14
    if kind.certifies:
        assert run.records[-1].gap < 0.1 * run.records[0].gap


@members
def test_a_run_saved_in_the_middle_goes_on_bit_by_bit_and_states_keep_their_form(
    kind: type,
) -> None:
    problem = Problem(seed=4)
    whole, saved = Run(kind(), problem.team(3)), io.BytesIO()
    forms = [form(state) for state in whole.states]
    for number in range(7):
        whole.round()
        assert [form(state) for state in whole.states] == forms
        if number == 2:
            torch.save(whole.states, saved)
    saved.seek(0)
    again = Run(kind(), problem.team(3), states=torch.load(saved, weights_only=True))
    for _ in range(4):
        again.round()
    for one, other in zip(whole.states, again.states, strict=True):
        for key, value in one.items():
            same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
            assert same, key
    kinds = {each for each in forms[0].values() if isinstance(each, type)}
    assert kinds <= {int, float, bool}


@members
def test_vectors_that_a_member_keeps_are_as_many_as_stated(kind: type) -> None:
    problem = Problem()
    (state,) = Run(kind(), problem.team(1)).states
    lengths = [v.numel() / problem.n_features for v in state.values() if torch.is_tensor(v)]
    of_samples = problem.n / problem.n_features
    blocks = 1 if "colours" in state else 0
    assert sum(each for each in lengths if each != of_samples) == 1 + kind().n_vectors + blocks


@pytest.mark.slice(3)
@members
def test_the_clock_and_processes_give_the_same_bits(kind: type, pool: Any) -> None:
    case = Case(kind(), 3)
    virtual, sent = pool(1).run(on_the_clock, case, 3)[0]
    real = pool(3).run(in_processes, case)
    assert torch.equal(real[0][0]["linear.weight"], virtual["linear.weight"])
    assert virtual["linear.weight"].abs().max() > 0.01
    assert [wire for _, _, wire in real] == sent


@members
@pytest.mark.slice(2)
def test_a_checkpoint_gives_the_same_bits_and_serves_other_numbers_of_workers(
    kind: type, pool: Any, tmp_path: Path
) -> None:
    case = Case(kind(), 3, steps=4)
    whole, _, _ = pool(3).run(in_processes, case, folder(tmp_path, "whole"))[0]
    path = folder(tmp_path, "cut")
    _, stopped, _ = pool(3).run(in_processes, case, path, 1)[0]
    assert stopped < case.steps
    resumed, _, _ = pool(3).run(in_processes, case, path, 0, True)[0]
    assert torch.equal(resumed["linear.weight"], whole["linear.weight"])
    fewer = case.more(n=2, steps=400 if kind is BlockCoordinate else 120)
    ended, steps, _ = pool(2).run(in_processes, fewer, path, 0, True)[0]
    assert steps == fewer.steps
    w = ended["linear.weight"].numpy()
    assert fewer.problem.value(w) - fewer.problem.value(fewer.problem.best) < 1e-7


def test_pscope_goes_down_in_a_line() -> None:
    problem = Problem(Objective(penalty=Penalty(l1=1e-3, l2=1e-3)), n=3000, n_features=60)
    run = Run(PSCOPE(), problem.team(4))
    run.until(lambda _: run.records[-1].gap < 1e-11, 60)
    logs = np.log([record.gap for record in run.records])
    assert logs[-1] < math.log(1e-11)
    assert np.corrcoef(np.arange(len(logs)), logs)[0, 1] ** 2 > 0.9


@pytest.mark.parametrize(
    ("sync", "penalty"),
    [
        (PSCOPE(), Penalty(l1=1e-3, l2=1e-3)),
        (SCOPE(), Penalty(l2=1e-3)),
        (DSVRG(), Penalty(l1=1e-3, l2=1e-3)),
        (DANE(), Penalty(l1=1e-3, l2=1e-3)),
        (CoCoA(), Penalty(l1=1e-3, l2=2e-2)),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_last_rounds_gain_as_many_digits_as_the_first(sync: Any, penalty: Penalty) -> None:
    problem = Problem(Objective(penalty=penalty), n=3000, n_features=60)
    run = Run(sync, problem.team(4))
    assert run.until(lambda _: run.records[-1].gap < 1e-11, 60) > 0
    logs = np.log([record.gap for record in run.records])
    assert np.corrcoef(np.arange(len(logs)), logs)[0, 1] ** 2 > 0.95
    middle = len(logs) // 2
    first, last = (logs[0] - logs[middle]) / middle, (logs[middle] - logs[-1]) / middle
    assert last > first / 2


def test_dsvrg_lets_one_worker_after_another_walk() -> None:
    walked: list[int] = []

    class Walks(LinearTask):
        def steps(self, asked: Steps) -> torch.Tensor:
            walked.append(asked.seed[1])
            return super().steps(asked)

    team = [
        replace(me, task=Walks(shard=me.task.shard, batch=me.task.batch))
        for me in Problem().team(3)
    ]
    run = Run(DSVRG(), team)
    for _ in range(7):
        run.round()
    assert walked == [0, 1, 2, 0, 1, 2, 0]


def test_admm_keeps_its_prices_where_rho_changes() -> None:
    run = Run(ADMM(), Problem().team(4))
    changed = 0
    for _ in range(30):
        before = run.states
        run.round()
        held = Run(ADMM(rho=before[0]["rho"] or 1.0), run.team, states=before)
        if before[0]["rho"] not in (0.0, run.states[0]["rho"]):
            changed += 1
            held.round()
            for ours, theirs in zip(run.states, held.states, strict=True):
                price = theirs["rho"] * theirs["u"]
                np.testing.assert_allclose(ours["rho"] * ours["u"], price, rtol=1e-12)
    assert changed >= 2


def test_owlqn_lets_no_weight_change_its_sign_at_once() -> None:
    crossed = 0
    for seed in range(6):
        problem = Problem(Objective(penalty=Penalty(l1=0.003)), n=60, seed=seed)
        run = Run(OWLQN(), problem.team(2))
        before = run.round()
        for _ in range(25):
            after = run.round()
            assert (before * after >= 0).all()
            crossed += int(((before != 0) & (after == 0)).sum())
            before = after
    assert crossed > 0


def test_blocks_of_one_colour_share_no_row_and_move_together() -> None:
    rng = np.random.default_rng(0)
    problem = Problem(n=200, n_features=12)
    x = np.zeros((200, 12))
    for group in range(3):  # four features of which each row has one
        x[np.arange(200), 4 * group + rng.integers(0, 4, 200)] = 1.0
    problem.__dict__["data"] = x, problem.data[1]
    sync = BlockCoordinate(blocks=12, independent=True)
    run = Run(sync, problem.team(4))
    run.round()
    colours = run.states[0]["colours"].numpy()
    assert colours.max() == 2
    for colour in range(3):
        assert ((x[:, colours == colour] != 0).sum(1) <= 1).all()
    coloured = run.until(_near(problem), 400)
    alone = Run(BlockCoordinate(blocks=12), problem.team(4)).until(_near(problem), 1600)
    assert 0 < coloured < alone / 3


def test_block_rounds_exchange_the_gradient_of_the_block_alone() -> None:
    problem = Problem()
    run = Run(BlockCoordinate(blocks=problem.n_features), problem.team(2))
    run.round()
    before = run.nbytes
    run.round()
    assert run.nbytes - before == 8


def test_too_many_blocks_to_colour_are_refused() -> None:
    BlockCoordinate(blocks=1 << 20).fits(1 << 20)
    BlockCoordinate(blocks=1 << 20, independent=True).fits(100)
    with pytest.raises(ConfigError, match="coloured"):
        BlockCoordinate(blocks=1 << 20, independent=True).fits(1 << 20)


# The spec


@members
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_that_a_member_cannot_take_are_refused(kind: type, name: str) -> None:
    from polyreme.spec.linear import linear
    from polyreme.spec.options import Spec

    penalty = PENALTIES[name]
    model = {
        "kind": "linear",
        "l1": penalty.l1,
        "l2": penalty.l2,
        "group_l1": penalty.group_l1,
        "group_size": penalty.group_size,
    }
    tables = {
        "model": model,
        "data": {"kind": "digits"},
        "data_parallel": {"sync": {"kind": kind.__struct_config__.tag}},
    }
    found = list(linear(msgspec.convert(tables, Spec)))
    assert [each.path for each in found] == (
        [] if takes(kind, penalty) else ["data_parallel.sync.kind"]
    )
    for each in found:
        assert kind.__name__ in each.rule
        for legal in MEMBERS:
            named = f'"{legal.__struct_config__.tag}"' in each.legal
            assert not named or takes(legal, penalty)
