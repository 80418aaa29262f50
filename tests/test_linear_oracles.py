"""Optima of polyreme.linear against those of scikit-learn, on sets that papers use."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale

from polyreme.linear import fit

DATA = os.environ.get("POLYREME_DATA")
QUICK = ("breast_cancer", "digits", "german_scale", "phishing_8404of11055", "dna_3class")
LONG = ("mushrooms_agaricus", "a9a", "w8a", "rcv1_small")
SETS = [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


def _set(name: str) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Rows, and labels -1 and 1: of more classes, the first against the rest."""
    if name in ("breast_cancer", "digits"):
        X, y = (load_breast_cancer if name[0] == "b" else load_digits)(return_X_y=True)
        return sparse.csr_matrix(scale(X) if name[0] == "b" else X / 16), np.where(y == 0, 1.0, -1)
    if DATA is None:
        pytest.skip("POLYREME_DATA is unset")
    with np.load(Path(DATA, "libsvm", f"{name}.npz")) as packed:
        parts = (packed["train_data"].astype(float), packed["train_indices"])
        y = packed["train_y"]
        shape = (len(y), int(packed["n_features"][0]))
        X = sparse.csr_matrix((*parts, packed["train_indptr"]), shape=shape)
    return X, np.where(y == (y.max() if len(np.unique(y)) == 2 else y.min()), 1.0, -1.0)


def _peers(X: sparse.csr_matrix, y: np.ndarray, l1: float, l2: float) -> list[np.ndarray]:
    whole, found = l1 + l2, []
    solvers = {"saga": (1e-9, 3000)} if l1 and l2 else {"liblinear": (1e-9, 20000)}
    if not l1:
        solvers |= {"lbfgs": (1e-9, 20000)}
    for solver, (tol, rounds) in solvers.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peer = LogisticRegression(
                C=1 / (len(y) * whole),
                l1_ratio=l1 / whole,
                solver=solver,
                tol=tol,
                max_iter=rounds,
                fit_intercept=False,
            ).fit(X, y)
        found.append(peer.coef_[0])
    return found


@pytest.mark.parametrize("penalty", ["l1", "l2", "elastic net"])
@pytest.mark.parametrize("name", SETS)
def test_optimum_and_support_are_those_of_scikit_learn(name, penalty):
    X, y = _set(name)
    n = len(y)
    largest = np.abs(X.T @ y).max() / 2 / n  # the l1 from which on all weights are 0
    l1 = 0.0 if penalty == "l2" else 0.03 * largest
    l2 = 0.0 if penalty == "l1" else 1e-3

    def whole(w):
        mean = np.logaddexp(0, -y * (X @ w)).mean()
        return mean + l1 * np.abs(w).sum() + l2 / 2 * (w @ w)

    found = fit(X, y, l1=l1, l2=l2, tol=1e-11)
    peers = _peers(X, y, l1, l2)
    best = min(peers, key=whole)
    assert found.gap <= 1e-10
    assert found.objective == pytest.approx(whole(found.w), abs=1e-12)
    assert found.objective <= whole(best) + 1e-10
    # The peer's own tolerance; the gap above says that none can find less by 1e-10.
    assert whole(best) <= found.objective + 1e-7
    z = X.T @ (-y / (1 + np.exp(y * (X @ found.w)))) / n + l2 * found.w
    used = np.flatnonzero(found.w)
    if not l1:
        assert np.abs(z).max() <= 1e-5
        return
    assert 0 < len(used) < np.count_nonzero(np.diff(X.tocsc().indptr))
    beyond = np.abs(z[found.w == 0]) - l1
    assert beyond.max() <= 1e-8
    np.testing.assert_allclose(z[used], -l1 * np.sign(found.w[used]), atol=1e-8)
    alone = np.linalg.matrix_rank(X[:, used].toarray()) == len(used)
    if alone and beyond.max() < -1e-6 and whole(best) <= found.objective + 1e-10:
        small = 1e-5 * np.abs(best).max() if l2 else 0.0  # saga leaves some that are nearly 0
        assert (np.flatnonzero(np.abs(best) > small) == used).all()
