"""Penalties without a gradient at 0, by rules and syncs that take gradients of workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import polyreme as pr
from lasso import L1, LASSO, WORKERS, D, N, clock_of, excess, model_of, shard_of, theirs
from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import alone, settled
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
from polyreme.convex.problem import Penalty
from polyreme.errors import ConfigError

torch.set_num_threads(1)


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
    clock = clock_of(DataParallel(rule=rule, sync=sync), lr, own=False)
    clock.play(steps)
    w, best = model_of(clock), theirs()
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


@pytest.mark.slice(3)
@pytest.mark.parametrize(("sync", "lr", "steps", "most"), APART, ids=_shown)
def test_where_workers_have_rows_of_their_own_the_optimum_is_that_of_all(
    sync, lr, steps, most
) -> None:
    """A prox at each worker, whose mean is none, leaves what is 0 at the optimum away from 0."""
    clock = clock_of(DataParallel(rule=RULE, sync=sync), lr)
    clock.play(steps)
    w, best = model_of(clock), theirs()
    assert excess(w, best, LASSO) < most
    assert callable(lr) or (w[best == 0] == 0).all()


GROUPS = Penalty(l1=0.01, group_l1=0.06, group_size=3, l2=0.02)


def _by_scipy(penalty: Penalty) -> float:
    """The least objective, in w = p - q and the norms' square roots: smooth but for bounds."""
    whole, k = shard_of(slice(None), penalty), D // penalty.group_size

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


@pytest.mark.slice(1)
@pytest.mark.parametrize(
    "sync", [EveryStep(), SSP(), AsyncADMM(rho=0.3, local_steps=4), DelayedBlockProximal(blocks=3)]
)
def test_groups_are_0_as_a_whole_and_no_block_cuts_one(sync) -> None:
    rule = ProximalSGD().of_penalty(GROUPS.l1, GROUPS.group_l1, GROUPS.group_size)
    clock = clock_of(DataParallel(rule=rule, sync=sync), 1.0, penalty=GROUPS, own=False)
    clock.play(600)
    w = model_of(clock)
    found = shard_of(slice(None), GROUPS).certificate(w)
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
    clock = clock_of(
        DataParallel(rule=rule, sync=sync),
        0.6,
        own=False,
        bad=lambda rank, batch: rank == 1 and batch % 5 == 2,
    )
    clock.play(600)
    np.testing.assert_allclose(model_of(clock), theirs(), atol=1e-5)


@pytest.mark.parametrize("sync", [SSP(), AsyncADMM(), DelayedBlockProximal(ahead=2)], ids=_shown)
@pytest.mark.parametrize("rule", [RULE, TruncatedGradient(gravity=L1, period=3)], ids=["prox", "t"])
def test_what_was_drained_goes_on_from_states_alone(sync, rule) -> None:
    algorithm = DataParallel(rule=rule, sync=sync)
    first = clock_of(algorithm, 0.3)
    first.play(7 * sync.per_push)
    first.drain()
    models = []
    for _ in range(2):
        clock = clock_of(algorithm, 0.3, states=[dict(state) for state in first.states])
        clock.play(20 * sync.per_push)
        clock.drain()
        models.append(model_of(clock))
    np.testing.assert_array_equal(*models)
    assert not np.array_equal(models[0], model_of(first))


def test_a_tensor_whose_groups_are_on_several_devices_is_refused() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        part = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        part.grad = part.detach().clone()
        with pytest.raises(ConfigError, match="ties entries of a tensor"):
            pr.optim.ProximalSGD([part], group_l1=1.0, group_size=2).step()
        pr.optim.ProximalSGD([part], lr=1.0, l1=1.0).step()
        assert not part.full_tensor().any()
    finally:
        distributed.destroy_process_group()
