"""Kernels of linear models' steps: skipped steps, dual steps, bounds of curvature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from finite_sums import Problem
from polyreme.convex import columns, dual, steps
from polyreme.convex.loss import CODES, conjugate
from polyreme.data.rows import Rows


def _walk(
    x: np.ndarray, y: np.ndarray, w: np.ndarray, slopes: np.ndarray, b: np.ndarray, **given: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Steps on dense rows of squared loss: the last model, and the mean of all."""
    eta, mu, l1, l2 = (given[name] for name in ("eta", "mu", "l1", "l2"))
    u, total = w.copy(), np.zeros_like(w)
    for i in given["order"]:
        u = (1 - eta * mu) * u - eta * (b + (x[i] @ u - y[i] - slopes[i]) * x[i])
        u = np.sign(u) * np.maximum(np.abs(u) - eta * l1, 0) / (1 + eta * l2)
        total += u
    return u, total / len(given["order"])


@pytest.mark.slice(6)
@pytest.mark.parametrize("seed", range(40))
def test_steps_that_are_skipped_come_to_what_they_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, n_features = 12, 30
    x = rng.normal(size=(n, n_features)) * (rng.random((n, n_features)) < 0.1)
    y, w = rng.normal(size=n), rng.normal(size=n_features) * (rng.random(n_features) < 0.7)
    slopes, b = rng.normal(size=n), rng.normal(size=n_features) * (rng.random(n_features) < 0.8)
    order = rng.integers(0, n, int(rng.integers(1, 400)))
    eta = 10 ** rng.uniform(-4, -0.5)
    mu, l1, l2 = (rng.choice([0.0, 10 ** rng.uniform(-6, 0)]) for _ in range(3))
    rows = Rows.of(x)
    given = (CODES["squared"], 0.5, rows.indptr, rows.indices, rows.values, y, w, slopes, b)
    walked = _walk(x, y, w, slopes, b, eta=eta, mu=mu, l1=l1, l2=l2, order=order)
    for mean, expected in enumerate(walked):
        how = (order, eta, mu, l1, l2, bool(mean))
        scale = 1e-10 * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(steps.lazy(*given, *how), expected, rtol=0, atol=scale)
        np.testing.assert_allclose(steps.dense(*given, *how, 0.0, 1), expected, rtol=0, atol=scale)


@pytest.mark.parametrize("q", [0.0, 1e-9, 1e-4, 0.01, 0.3, 1.0])
def test_a_number_left_alone_follows_its_recurrence(q: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        tau, d = (rng.choice([0.0, 10 ** rng.uniform(-6, 0)]) for _ in range(2))
        d *= rng.choice([-1, 1])
        u = rng.choice([0.0, rng.normal(), d, tau, -tau, (tau + d) * 3, 1e-12])
        m, at, total = int(rng.integers(0, 200)), u, 0.0
        for _ in range(m):
            at = (1 - q) * at - d
            at = math.copysign(max(abs(at) - tau, 0.0), at)
            total += at
        found, sums = steps.skipped(u, m, q, d, tau)
        size = max(1.0, abs(u), m * (abs(d) + tau))
        assert found == pytest.approx(at, abs=1e-12 * size)
        assert sums == pytest.approx(total, abs=1e-12 * size * max(1, m))


@pytest.mark.parametrize("loss", CODES)
def test_a_dual_step_is_the_best_there_is(loss: str) -> None:
    rng, code = np.random.default_rng(0), CODES[loss]
    for _ in range(300):
        y, p, q = rng.choice([-1.0, 1.0]), 5 * rng.normal(), 10 ** rng.uniform(-3, 3)
        a = y * rng.choice([0.0, 1e-9, rng.random(), 1.0]) if loss != "squared" else rng.normal()
        b = dual.best(code, 0.5, y, p, q, a)

        def height(c: float, y=y, p=p, q=q, a=a) -> float:
            return conjugate(code, 0.5, -c, y) + p * (c - a) + q / 2 * (c - a) ** 2

        least = height(b)
        assert math.isfinite(least)
        for by in (1e-5, 1e-3, 0.1):
            for side in (-by, by):
                assert height(b + side) >= least - 1e-13 * max(1.0, q, abs(p))


def test_curvatures_of_blocks_are_bounds() -> None:
    x, _ = Problem(seed=5).data
    rows, block = Rows.of(x), np.arange(x.shape[1]) // 3
    found = columns.curvatures(rows.indptr, rows.indices, rows.values, block)
    for b in np.unique(block):
        inside = block == b
        whole = np.diag(found[inside]) - x[:, inside].T @ x[:, inside]
        assert np.linalg.eigvalsh(whole).min() > -1e-10
