"""Kernels of linear models over more features than a core's own memory holds."""

from __future__ import annotations

import numpy as np
import pytest

from polyreme.convex import ahead, kernels, steps
from polyreme.convex.loss import CODES, slope, value
from polyreme.data.rows import Rows

_D = ahead.NEAR + 7


def _rows(rng: np.random.Generator, n: int, each: int) -> Rows:
    """Rows of up to so many numbers, some of none."""
    counts = rng.integers(0, each, n)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    found = [np.sort(rng.choice(_D, count, replace=False)) for count in counts]
    return Rows(
        indptr=indptr,
        indices=np.concatenate(found).astype(np.int32),
        values=rng.normal(size=indptr[-1]).astype(np.float32),
        n_features=_D,
    )


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("mu", "l1", "l2"), [(0.0, 1e-3, 1e-4), (0.0, 1e-3, 0.0), (0.1, 0.0, 0.2)])
def test_many_features_step_as_if_all_moved(mean: bool, mu: float, l1: float, l2: float) -> None:
    rng = np.random.default_rng(0)
    rows = _rows(rng, 40, 700)
    y, w = rng.choice([-1.0, 1.0], 40), rng.normal(size=_D) * (rng.random(_D) < 0.5)
    slopes, b = rng.normal(size=40), 1e-3 * rng.normal(size=_D)
    given = (CODES["logistic"], 0.5, rows.indptr, rows.indices, rows.values, y, w, slopes, b)
    how = (rng.integers(0, 40, 300), 0.01, mu, l1, l2, mean)
    expected = steps.dense(*given, *how, 0.0, 1)
    np.testing.assert_allclose(steps.lazy(*given, *how), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "each"), [(20, 100), (400, 700), (0, 1)])
def test_the_gradient_of_many_features_is_that_of_scipy(n: int, each: int) -> None:
    rng = np.random.default_rng(1)
    rows = _rows(rng, n, each) if n else Rows.of(np.zeros((0, _D)))
    y, w = rng.choice([-1.0, 1.0], n), rng.normal(size=_D)
    code, x = CODES["logistic"], rows.scipy().astype(np.float64)
    z, slopes, loss = kernels.gradient(code, 0.5, rows.indptr, rows.indices, rows.values, y, w)
    p = x @ w
    own = [slope(code, 0.5, *each) for each in zip(p, y, strict=True)]
    np.testing.assert_allclose(slopes, own, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(z, x.T @ np.array(own), rtol=0, atol=1e-11)
    total = sum(value(code, 0.5, *each) for each in zip(p, y, strict=True))
    assert loss == pytest.approx(total, rel=1e-12)
    assert z.flags.c_contiguous


@pytest.mark.parametrize("q", [0.0, 1e-12, 1e-7, 1e-5, 1e-3, 0.3, 1.0])
@pytest.mark.parametrize("n", [0, 1, 2, 1000, 1025, 5_000_000])
def test_powers_of_two_readings_are_those_of_logarithms(n: int, q: float) -> None:
    rungs, bits = steps.ladder(n, q)
    for m in {0, n // 3, n // 2, max(0, n - 1), n, min(n, 1023), min(n, 1024)}:
        expected = steps.powers(m, q)
        np.testing.assert_allclose(steps.climbed(rungs, bits, m), expected, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_records_lie_in_one_cache_line_each(n: int) -> None:
    found = ahead.records(n, steps.FEATURE)
    assert len(found) == n
    assert not found.ctypes.data % 64 or not n
    assert 64 % found.itemsize == 0
