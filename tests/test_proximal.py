"""Penalties without a gradient at 0, by rules and syncs that take gradients of workers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression

from polyreme import api, runlog
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed, alone, settled
from polyreme.algo.optimizer import RuleOptimizer
from polyreme.algo.rule import ProximalSGD, TruncatedGradient
from polyreme.algo.sync import (
    ASGD,
    BASGD,
    R2SP,
    SSP,
    AsyncADMM,
    BackupWorkers,
    DelayedBlockProximal,
    Downpour,
    EveryStep,
    Hogwild,
    LocalSteps,
)
from polyreme.algo.vector import Layout
from polyreme.convex import kernels
from polyreme.convex.loss import sharpest
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.shard import Shard
from polyreme.convex.task import LinearTask
from polyreme.data.rows import Rows
from polyreme.errors import ConfigError
from polyreme.sim.compute import LogNormal
from polyreme.sim.driver import Simulation
from served import team

torch.set_num_threads(1)

N, D, WORKERS = 120, 12, 3
L1 = 0.04
LASSO = Penalty(l1=L1)


def _data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(N, D))
    w = np.zeros(D)
    w[:4] = [2.0, -1.5, 1.0, 0.5]
    return x, np.where(rng.random(N) < 1 / (1 + np.exp(-x @ w)), 1.0, -1.0)


X, Y = _data()


def _shard(which: Any, penalty: Penalty) -> Shard:
    return Shard(objective=Objective(penalty=penalty), rows=Rows.of(X[which]), y=Y[which])


def _theirs(l1: float = L1) -> np.ndarray:
    """By sklearn."""
    model = LogisticRegression(
        l1_ratio=1.0,
        C=1 / (N * l1),
        solver="saga",
        fit_intercept=False,
        tol=1e-12,
        max_iter=100_000,
    )
    return model.fit(X, Y).coef_[0]


def _excess(w: np.ndarray, best: np.ndarray, penalty: Penalty) -> float:
    whole = _shard(slice(None), penalty)
    return whole.certificate(w).objective - whole.certificate(best).objective


def _clock(
    algorithm: DataParallel,
    lr: Any,
    *,
    penalty: Penalty = LASSO,
    own: bool = True,
    bad: Any = None,
    **more: Any,
) -> Simulation:
    """Workers with whole gradients of their own rows, or of all rows."""
    parts = [slice(rank if own else 0, None, WORKERS if own else 1) for rank in range(WORKERS)]
    tasks = [LinearTask(shard=_shard(each, penalty), batch=N // WORKERS) for each in parts]
    players = [
        replace(me, task=tasks[me.rank] if me.rank < WORKERS else None)
        for me in team(algorithm, Layout.of({"w": (D,)}), WORKERS, lr=lr)
    ]

    def gradient(rank: int, params: torch.Tensor, batch: int) -> Computed:
        task = tasks[rank]
        found = task.at(params).gradient / task.n_own + penalty.l2 * params
        if bad is not None and bad(rank, batch):
            found = found * math.nan
        return Computed(gradient=found, loss=0.0, weight=float(task.n_own), n_samples=task.n_own)

    start = torch.zeros(D, dtype=torch.float64)
    states = more.pop("states", None)
    given = states or [algorithm.sync.init(algorithm, start.clone(), me) for me in players]
    return Simulation(algorithm, players, given, gradient, compute=LogNormal(spread=0.5), **more)


def _model(clock: Simulation) -> np.ndarray:
    sync = clock.algorithm.sync
    if len(clock.states) > WORKERS:
        return sync.whole(clock.states[WORKERS:], clock.states[:WORKERS]).numpy()
    return clock.states[0]["params"].numpy()


RULE = ProximalSGD(l1=L1)
ALIKE = {
    "EveryStep": (EveryStep(), 1.5, 150),
    "LocalSteps": (LocalSteps(every=4), 1.5, 150),
    "ASGD": (ASGD(), 0.6, 60),
    "ASGD of 3": (ASGD(servers=3), 0.6, 60),
    "Hogwild": (Hogwild(), 0.6, 60),
    "R2SP": (R2SP(), 0.6, 90),
    "SSP": (SSP(), 1.5, 150),
    "SSP of 2": (SSP(servers=2, staleness=0), 1.5, 150),
    "SSP, no bound": (SSP(staleness=10**6), 1.5, 150),
    "BackupWorkers": (BackupWorkers(backups=1), 1.5, 150),
    "BASGD": (BASGD(buffers=2), 1.5, 150),
    "Downpour": (Downpour(push_every=2, fetch_every=4), 0.3, 200),
}
TRUNCATED = TruncatedGradient(gravity=L1)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        *((name, RULE) for name in ALIKE),
        *((name, TRUNCATED) for name in ("EveryStep", "SSP", "Downpour")),
    ],
)
def test_where_workers_have_the_same_rows_the_optimum_is_reached_with_its_zeros(name, rule) -> None:
    """A penalty that is taken n times too often, or too seldom, has another optimum."""
    sync, lr, steps = ALIKE[name]
    clock = _clock(DataParallel(rule=rule, sync=sync), lr, own=False)
    clock.play(steps)
    w, best = _model(clock), _theirs()
    np.testing.assert_allclose(w, best, atol=1e-6)
    assert {*np.flatnonzero(w)} == {*np.flatnonzero(best)}
    assert 0 < len(np.flatnonzero(best)) < D


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def _falling(step: int) -> float:
    return 1 / (1 + step / 10)


APART = [
    (EveryStep(), 1.0, 150, 1e-12),
    (BackupWorkers(backups=0), 1.0, 150, 1e-12),
    (AsyncADMM(rho=0.3, barrier=WORKERS, delay=1, local_steps=8), 0.5, 800, 1e-12),
    (AsyncADMM(rho=0.3, barrier=1, delay=4, local_steps=8), 0.5, 1200, 1e-12),
    (DelayedBlockProximal(), 0.1, 200, 1e-9),
    (DelayedBlockProximal(blocks=5), 0.1, 300, 1e-9),
    (DelayedBlockProximal(ahead=2, blocks=4), 0.1, 700, 1e-9),
    # one gradient after another: the last ones' rates are what is between w and the optimum
    (SSP(staleness=0), _falling, 1500, 1e-5),
    (SSP(staleness=10**6), _falling, 1500, 5e-5),
    (ASGD(), _falling, 1500, 1e-4),
]


@pytest.mark.parametrize(("sync", "lr", "steps", "most"), APART, ids=_shown)
def test_where_workers_have_rows_of_their_own_the_optimum_is_that_of_all(
    sync, lr, steps, most
) -> None:
    """A prox at each worker, whose mean is none, leaves what is 0 at the optimum away from 0."""
    clock = _clock(DataParallel(rule=RULE, sync=sync), lr)
    clock.play(steps)
    w, best = _model(clock), _theirs()
    assert _excess(w, best, LASSO) < most
    assert callable(lr) or (w[best == 0] == 0).all()


GROUPS = Penalty(l1=0.01, group_l1=0.06, group_size=3, l2=0.02)


def _by_scipy(penalty: Penalty) -> float:
    """The least objective, in w = p - q and the norms' square roots: smooth but for bounds."""
    whole, k = _shard(slice(None), penalty), D // penalty.group_size

    def value(z: np.ndarray) -> tuple[float, np.ndarray]:
        p, q, t = z[:D], z[D : 2 * D], z[2 * D :]
        w, at = p - q, whole.at(p - q)
        # |w_g| = min_t |w_g|^2 / (2 t) + t / 2
        size = t + 1e-9
        squares = (w * w).reshape(k, -1).sum(1)
        loss = at.loss / N + penalty.l2 / 2 * w @ w + penalty.l1 * (p + q).sum()
        loss += penalty.group_l1 * (squares / size + size).sum() / 2
        slope = at.gradient / N + penalty.l2 * w
        slope = slope + penalty.group_l1 * w / np.repeat(size, penalty.group_size)
        of_t = penalty.group_l1 * (1 - squares / size**2) / 2
        return loss, np.concatenate([slope + penalty.l1, -slope + penalty.l1, of_t])

    start = np.concatenate([np.full(2 * D, 0.1), np.ones(k)])
    found = minimize(
        value,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=[(0, None)] * len(start),
        options={"maxiter": 20_000, "maxfun": 40_000, "ftol": 1e-15, "gtol": 1e-10},
    )
    return float(found.fun)


@pytest.mark.parametrize(
    "sync", [EveryStep(), SSP(), AsyncADMM(rho=0.3, local_steps=4), DelayedBlockProximal(blocks=3)]
)
def test_groups_are_0_as_a_whole_and_no_block_cuts_one(sync) -> None:
    rule = ProximalSGD().of_penalty(GROUPS.l1, GROUPS.group_l1, GROUPS.group_size)
    clock = _clock(DataParallel(rule=rule, sync=sync), 1.0, penalty=GROUPS, own=False)
    clock.play(600)
    w = _model(clock)
    found = _shard(slice(None), GROUPS).certificate(w)
    assert found.gap < 1e-6
    assert found.objective == pytest.approx(_by_scipy(GROUPS), abs=1e-6)
    sizes = [np.count_nonzero(group) for group in w.reshape(-1, 3)]
    assert 0 in sizes
    assert max(sizes) > 0


def test_a_step_is_the_prox_of_the_penalty_at_the_step_s_rate() -> None:
    """Another order of the two shrinkages, or one at another rate, is another prox."""
    rng = np.random.default_rng(0)
    for size in (1, 4, 5, 20):
        penalty = Penalty(l1=0.3, group_l1=0.7, group_size=size)
        rule = ProximalSGD(l1=0.3, group_l1=0.7, group_size=size)
        w, g = rng.normal(size=(2, 13))
        delta, _ = rule.update(
            torch.from_numpy(g),
            {},
            torch.from_numpy(w),
            lr=0.4,
            layout=Layout.of({"w": (13,)}),
        )
        expected = penalty.prox(w - 0.4 * g, 0.4)
        np.testing.assert_allclose(w + delta.numpy(), expected, atol=1e-15)
        assert ((w + delta.numpy() == 0) == (expected == 0)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [
        ProximalSGD(l1=1.0),
        ProximalSGD(group_l1=3.0, group_size=4),
        TruncatedGradient(gravity=1.0, threshold=5.0),
    ],
    ids=_shown,
)
def test_zeros_are_exact_in_every_type_and_a_rate_of_0_changes_nothing(rule, dtype) -> None:
    w = torch.randn(11, generator=torch.Generator().manual_seed(0)).to(dtype)
    g, layout = torch.full((11,), 0.1, dtype=dtype), Layout.of({"a": (7,), "b": (4,)})
    still, _ = alone(settled(rule.update(g, rule.init(w), w, lr=0.0, layout=layout)))
    assert torch.equal(w + still, w)
    moved, _ = alone(settled(rule.update(g, rule.init(w), w, lr=3.0, layout=layout)))
    assert ((w + moved) == 0).any()
    parameter = torch.nn.Parameter(w.clone())
    parameter.grad = g
    RuleOptimizer([parameter], type(rule)(**{**_fields(rule), "lr": 3.0})).step()
    assert (parameter == 0).any()
    nothing, _ = rule.update(w[:0], rule.init(w[:0]), w[:0], lr=1.0, layout=Layout.of({"w": (0,)}))
    assert nothing.shape == (0,)


def _fields(rule: Any) -> dict[str, Any]:
    return {name: getattr(rule, name) for name in rule.__struct_fields__}


def test_weights_beyond_the_threshold_are_left_and_others_only_when_it_is_due() -> None:
    rule, layout = TruncatedGradient(gravity=0.5, period=2, threshold=1.0), Layout.of({"w": (4,)})
    w = torch.tensor([0.3, -0.9, 1.01, 0.0], dtype=torch.float64)
    zero = torch.zeros_like(w)
    delta, state = rule.update(zero, rule.init(w), w, lr=0.6, layout=layout)
    assert torch.equal(delta, zero)
    delta, state = rule.update(zero, state, w, lr=0.6, layout=layout)
    expected = torch.tensor([0.0, -0.3, 1.01, 0.0], dtype=torch.float64)
    torch.testing.assert_close(w + delta, expected, rtol=0, atol=1e-15)
    assert state == {"step": 2}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_does_not_become_0(bad: float) -> None:
    w, g = torch.ones(6).double(), torch.zeros(6).double()
    g[1], layout = bad, Layout.of({"w": (6,)})
    for rule in (ProximalSGD(l1=9.0), ProximalSGD(group_l1=9.0, group_size=2)):
        delta, _ = rule.update(g, {}, w, lr=0.5, layout=layout)
        assert not delta[1].isfinite()


@pytest.mark.parametrize("sync", [EveryStep(), SSP(), ASGD(), AsyncADMM(local_steps=2)], ids=_shown)
def test_gradients_that_are_not_finite_are_left_out(sync) -> None:
    rule = ProximalSGD(l1=L1)
    clock = _clock(
        DataParallel(rule=rule, sync=sync),
        0.6,
        own=False,
        bad=lambda rank, batch: rank == 1 and batch % 5 == 2,
    )
    clock.play(600)
    np.testing.assert_allclose(_model(clock), _theirs(), atol=1e-5)


def test_an_iteration_with_a_bad_block_changes_nothing() -> None:
    """Rows of one worker left out of a sum are another problem."""

    class Bad(LinearTask):
        n_asked = 0

        def at(self, w: torch.Tensor) -> Any:
            found = super().at(w)
            Bad.n_asked += 1
            if Bad.n_asked % 3 == 1:
                found.gradient.fill_(math.nan)
            return found

    clock = _clock(DataParallel(rule=RULE, sync=DelayedBlockProximal(ahead=1)), 0.3)
    player = clock._players[1]
    task: Any = player.me.task
    player.me = replace(player.me, task=Bad(shard=task.shard, batch=task.batch))
    clock.play(700)
    assert Bad.n_asked > 600
    assert _excess(_model(clock), _theirs(), LASSO) < 1e-9


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_worker_begins_an_iteration_before_all_but_the_last_are_done(ahead: int) -> None:
    records: list[Any] = []
    clock = _clock(
        DataParallel(rule=RULE, sync=DelayedBlockProximal(ahead=ahead)),
        0.1,
        on_record=lambda _me, record, _s: records.append(record),
    )
    begun: list[int] = []
    for _ in range(40):
        clock.play(len(records) // WORKERS + 1)
        version = clock.states[WORKERS]["version"]
        begun += [each["pushes"] - version for each in clock.states[:WORKERS]]
    assert max(begun) <= ahead + 1
    delays = [delay for record in records for delay in record.delays]
    assert min(delays) >= 0
    assert max(delays) <= ahead
    assert (max(delays) > 0) == (ahead > 0)


@pytest.mark.parametrize("sync", [SSP(), AsyncADMM(), DelayedBlockProximal(ahead=2)], ids=_shown)
@pytest.mark.parametrize("rule", [RULE, TruncatedGradient(gravity=L1, period=3)], ids=["prox", "t"])
def test_what_was_drained_goes_on_from_states_alone(sync, rule) -> None:
    algorithm = DataParallel(rule=rule, sync=sync)
    first = _clock(algorithm, 0.3)
    first.play(7 * sync.per_push)
    first.drain()
    models = []
    for _ in range(2):
        clock = _clock(algorithm, 0.3, states=[dict(state) for state in first.states])
        clock.play(20 * sync.per_push)
        clock.drain()
        models.append(_model(clock))
    np.testing.assert_array_equal(*models)
    assert not np.array_equal(models[0], _model(first))


def test_bounds_of_curvature_are_above_it_and_of_the_block_alone() -> None:
    """A bound that is too small lets steps diverge."""
    rng = np.random.default_rng(1)
    shard = _shard(slice(None), Penalty())
    for start, stop in ((0, D), (3, 7), (5, 6), (4, 4)):
        block = X[:, start:stop]
        for w in rng.normal(size=(3, D)):
            bend = kernels.bends(*shard.given, w)
            hessian = block.T * bend @ block
            least = np.linalg.eigvalsh(np.diag(shard.bounds(start, stop)) - hessian)
            assert (least >= -1e-9).all()
        expected = sharpest(*shard.given[:2]) * (np.abs(block).T @ np.abs(block)).sum(1)
        np.testing.assert_allclose(shard.bounds(start, stop), expected, rtol=1e-12)


# Specs ------------------------------------------------------------------------------------------

SPEC = """
[model]
kind = "linear"
l1 = 0.04

[data]
kind = "arrays"
path = "{path}"
heldout = 0

[train]
steps = 400
global_batch = {batch}
eval_every = 200

[cluster]
cpu_processes = 2

[data_parallel]
sync = {{ kind = "ASGD" }}
rule = {{ kind = "ProximalSGD", lr = 0.3 }}

[simulate]
workers = 2
"""
ASYNC = 'sync = { kind = "ASGD" }'


def _spec(folder: Path, *changes: tuple[str, str]) -> Path:
    arrays, path = folder / "rows.npz", folder / "spec.toml"
    np.savez(arrays, x_train=X, y_train=(Y > 0).astype(int))
    text = SPEC.format(path=arrays, batch=N)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def _objective(run: Path) -> float:
    events = runlog.read(run / "log.jsonl")
    evaluated = [event for event in events if isinstance(event, runlog.EvalEvent)]
    return evaluated[-1].metrics["objective"]


CLOCKS = {
    "asynchronous": ASYNC,
    "stale": 'sync = { kind = "SSP", staleness = 1000000 }',
    "blocks": 'sync = { kind = "DelayedBlockProximal", ahead = 1, blocks = 3 }',
    "admm": 'sync = { kind = "AsyncADMM", rho = 0.3 }',
}


@pytest.mark.slice(1)
@pytest.mark.parametrize("name", CLOCKS)
def test_both_clocks_come_near_the_optimum(name: str, tmp_path: Path) -> None:
    spec = _spec(tmp_path, (ASYNC, CLOCKS[name]))
    best = _shard(slice(None), LASSO).certificate(_theirs()).objective
    api.simulate(spec, out=tmp_path / "clock")
    api.train(spec, out=tmp_path / "processes", progress=False)
    for run in ("clock", "processes"):
        assert best - 1e-6 < _objective(tmp_path / run) < best + 1e-2


PROX = 'rule = { kind = "ProximalSGD", lr = 0.3 }'
GROUPED = ("l1 = 0.04", "group_l1 = 0.04\ngroup_size = 3")
OF_LAYERS = ('kind = "linear"\nl1 = 0.04', 'kind = "mlp"\nhidden = [2]')
REFUSED = {
    "another rule": (
        [(PROX, 'rule = { kind = "SGD" }')],
        'out. Legal: "ProximalSGD", "TruncatedGradient" (or model.l1 = 0, ',
    ),
    "the default rule": ([(PROX, "")], '"AdamW" leaves the l1 of the model out'),
    "no rule for groups": (
        [GROUPED, (PROX, 'rule = { kind = "TruncatedGradient" }')],
        '"TruncatedGradient" leaves the group_l1 of the model out. Legal: "ProximalSGD" (or ',
    ),
    "a sync that is SGD": (
        [(ASYNC, 'sync = { kind = "OrMo" }'), (PROX, 'rule = { kind = "SGD" }')],
        'data_parallel.sync.kind: "OrMo" is SGD with momentum, which leaves model.l1 out',
    ),
    "another penalty": (
        [(PROX, 'rule = { kind = "ProximalSGD", l1 = 0.1 }')],
        "rule.l1: 0.1 is not model.l1, which the objective has. Legal: leave it out (or 0.04).",
    ),
    "groups in pieces": (
        [GROUPED, (ASYNC, 'sync = { kind = "ASGD", servers = 2 }')],
        "data_parallel.sync.servers: 2 splits vectors, and data_parallel.rule ProximalSGD has",
    ),
    "groups in pieces that servers settle": (
        [GROUPED, (ASYNC, 'sync = { kind = "SSP", servers = 2 }')],
        "data_parallel.sync.servers: 2 splits vectors, and data_parallel.rule ProximalSGD has",
    ),
    "blocks with another step": (
        [
            ("l1 = 0.04", "l2 = 0.04"),
            (ASYNC, 'sync = { kind = "DelayedBlockProximal" }'),
            (PROX, 'rule = { kind = "SGD", momentum = 0.9 }'),
        ],
        'data_parallel.rule.kind: "SGD" has a step of its own, and DelayedBlockProximal takes',
    ),
    "groups of layers' weights": (
        [OF_LAYERS, (PROX, 'rule = { kind = "ProximalSGD", group_l1 = 0.1 }')],
        "data_parallel.rule.group_l1: 0.1 ties features of a linear model, and the model is none",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_penalty_that_nobody_would_take_is_refused(name: str, tmp_path: Path) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        api.simulate(_spec(tmp_path, *changes), out=tmp_path / "run")
    assert said in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        [("l1 = 0.04", "l2 = 0.04"), (PROX, 'rule = { kind = "SGD" }')],
        [(PROX, 'rule = { kind = "ProximalSGD", l1 = 0.04 }')],
        [(ASYNC, 'sync = { kind = "pSCOPE" }'), (PROX, "")],
        [OF_LAYERS, (PROX, 'rule = { kind = "ProximalSGD", l1 = 0.1 }')],
        [GROUPED, (ASYNC, 'sync = { kind = "LocalSteps" }')],
    ],
    ids=_shown,
)
def test_what_takes_the_penalty_or_has_none_is_not_refused(changes, tmp_path: Path) -> None:
    spec = _spec(tmp_path, ("steps = 400", "steps = 2"), ("eval_every = 200", ""), *changes)
    assert api.simulate(spec, out=tmp_path / "run").steps == 2
