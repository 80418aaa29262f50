"""A small problem with an l1 penalty: workers that have parts of its rows, and its optimum."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression

from polyreme.algo.compose import DataParallel
from polyreme.algo.effects import Computed
from polyreme.algo.vector import Layout
from polyreme.convex import shard
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.task import LinearTask
from polyreme.data.rows import Rows
from polyreme.sim.compute import LogNormal
from polyreme.sim.driver import Simulation
from served import team

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


def shard_of(which: Any, penalty: Penalty) -> shard.Shard:
    return shard.Shard(objective=Objective(penalty=penalty), rows=Rows.of(X[which]), y=Y[which])


def theirs(l1: float = L1) -> np.ndarray:
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


def excess(w: np.ndarray, best: np.ndarray, penalty: Penalty) -> float:
    whole = shard_of(slice(None), penalty)
    return whole.certificate(w).objective - whole.certificate(best).objective


def clock_of(
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
    tasks = [LinearTask(shard=shard_of(each, penalty), batch=N // WORKERS) for each in parts]
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


def model_of(clock: Simulation) -> np.ndarray:
    sync = clock.algorithm.sync
    if len(clock.states) > WORKERS:
        return sync.whole(clock.states[WORKERS:], clock.states[:WORKERS]).numpy()
    return clock.states[0]["params"].numpy()
