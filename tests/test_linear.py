"""polyreme.linear: certificates against peers, edges, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize, sparse

import polyreme as pr
from polyreme.convex import newton
from polyreme.convex.problem import Objective, Penalty
from polyreme.convex.shard import Shard
from polyreme.data.rows import Rows
from polyreme.errors import ConfigError
from polyreme.linear import fit

GOLDEN = Path(__file__).parent / "golden"
LOSSES = ("logistic", "squared_hinge", "hinge", "squared")
PENALTIES = {
    "l1": {"l1": 0.02},
    "l2": {"l2": 0.01},
    "elastic net": {"l1": 0.01, "l2": 0.01},
    "groups": {"group_l1": 0.03, "group_size": 3},
    "sparse groups": {"l1": 0.01, "group_l1": 0.02, "l2": 0.01, "group_size": 4},
}


def _drawn(n: int, d: int, density: float, seed: int) -> tuple[sparse.csr_matrix, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = sparse.random(n, d, density, format="csr", random_state=rng)
    X.data = rng.standard_normal(len(X.data))
    y = X @ (rng.standard_normal(d) * (rng.random(d) < 0.3)) + 0.3 * rng.standard_normal(n)
    return X, y


def _loss(name: str, p: np.ndarray, y: np.ndarray, gamma: float) -> float:
    """Mean losses, written down anew."""
    m = y * p
    if name == "logistic":
        return float(np.logaddexp(0, -m).mean())
    if name == "squared":
        return float(((p - y) ** 2).mean() / 2)
    if name == "squared_hinge":
        return float((np.maximum(0, 1 - m) ** 2).mean())
    bent = (1 - m) ** 2 / (2 * gamma)
    return float(np.where(m >= 1, 0, np.where(m <= 1 - gamma, 1 - m - gamma / 2, bent)).mean())


def _penalty(w: np.ndarray, l1=0.0, l2=0.0, group_l1=0.0, group_size=1) -> float:
    groups = [w[at : at + group_size] for at in range(0, len(w), group_size)]
    norms = sum(np.sqrt((each**2).sum()) for each in groups)
    return l1 * np.abs(w).sum() + group_l1 * norms + l2 / 2 * (w**2).sum()


@pytest.mark.parametrize("name", json.loads((GOLDEN / "logistic.json").read_text())["objectives"])
def test_golden_objectives_and_weights(name):
    golden = np.load(GOLDEN / "logistic.npz")
    parts = name.split("_")
    strengths = dict(zip(parts[::2], map(float, parts[1::2]), strict=True))
    found = fit(golden["X"], golden["y"], **strengths, tol=1e-13)
    objective = json.loads((GOLDEN / "logistic.json").read_text())["objectives"][name]
    assert found.objective == pytest.approx(objective, abs=1e-12)
    assert found.gap <= 1e-13
    np.testing.assert_allclose(found.w, golden[name], atol=1e-6)
    assert ((found.w != 0) == (golden[name] != 0)).all()


@pytest.mark.slice(6)
@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("route", ["whole", "by column", "widening", "widening by column"])
def test_no_step_of_proximal_gradient_finds_less(loss, penalty, route, monkeypatch):
    """The optimum, by whichever way it is had, is a fixed point of a method that shares no code."""
    monkeypatch.setattr(newton, "_WHOLE", 0 if "column" in route else 10**6)
    monkeypatch.setattr(newton, "_FEW", 0 if "widening" in route else 10**6)
    X, y = _drawn(120, 40, 0.3, seed=3)
    y = y if loss == "squared" else np.sign(y)
    strengths, gamma = PENALTIES[penalty], 0.5
    found = fit(X, y, loss=loss, gamma=gamma, tol=1e-12, **strengths)
    assert found.converged
    assert found.gap <= 1e-12

    def whole(w):
        return _loss(loss, X @ w, y, gamma) + _penalty(w, **strengths)

    assert found.objective == pytest.approx(whole(found.w), abs=1e-14)
    rng = np.random.default_rng(0)
    for size in (1e-1, 1e-3, 1e-5):
        for _ in range(20):
            assert whole(found.w + size * rng.standard_normal(40)) >= found.objective - 1e-14
            some = found.w * (1 + size * rng.standard_normal(40))
            assert whole(some) >= found.objective - 1e-14


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("whole", [0, 10**6])
def test_smooth_objectives_against_bfgs(loss, whole, monkeypatch):
    monkeypatch.setattr(newton, "_WHOLE", whole)
    X, y = _drawn(150, 12, 0.5, seed=5)
    y = y if loss == "squared" else np.sign(y)
    found = fit(X, y, loss=loss, l2=0.03, tol=1e-12)
    peer = optimize.minimize(
        lambda w: _loss(loss, X @ w, y, 0.5) + 0.015 * (w**2).sum(),
        np.zeros(12),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    assert found.objective <= peer.fun + 1e-12
    np.testing.assert_allclose(found.w, peer.x, atol=1e-5)


def test_without_a_penalty_the_gradient_says_how_good():
    X, y = _drawn(300, 10, 0.5, seed=7)
    found = fit(X, y, loss="squared", tol=1e-10)
    np.testing.assert_allclose(found.w, np.linalg.lstsq(X.toarray(), y)[0], atol=1e-9)
    assert found.gap == np.inf
    assert found.converged
    assert "gradient" in str(found)


def test_separable_rows_without_a_penalty_end_with_a_small_gradient():
    found = fit(np.array([[1.0], [2.0], [-1.0]]), [1, 1, 0], tol=1e-6)
    assert found.converged
    assert found.w[0] > 10


@pytest.mark.parametrize("penalty", PENALTIES)
def test_many_rows_begin_from_some_and_end_at_the_same(penalty, monkeypatch):
    X, y = _drawn(4000, 60, 0.2, seed=9)
    strengths = PENALTIES[penalty]
    begun = []
    real = newton._begun
    monkeypatch.setattr(newton, "_SAMPLE", 100)
    monkeypatch.setattr(newton, "_begun", lambda *a: begun.append(real(*a)) or begun[-1])
    sampled = fit(X, np.sign(y), tol=1e-13, **strengths)
    assert begun[0].any()
    monkeypatch.setattr(newton, "_SAMPLE", 10**9)
    plain = fit(X, np.sign(y), tol=1e-13, **strengths)
    assert not begun[1].any()
    assert sampled.objective == pytest.approx(plain.objective, abs=1e-12)


def test_rows_that_are_sorted_by_label_begin_no_worse_than_at_zero():
    X, y = _drawn(4000, 60, 0.2, seed=9)
    order = np.argsort(y)
    found = fit(X[order], np.sign(y[order]), l2=0.01, tol=1e-12)
    assert found.objective == pytest.approx(fit(X, np.sign(y), l2=0.01, tol=1e-12).objective)


def test_many_features_few_of_them_in_use():
    X, y = _drawn(400, 6000, 0.01, seed=11)
    found = fit(X, np.sign(y), l1=0.004, tol=1e-12)
    assert 5 < np.count_nonzero(found.w) < 400
    z = X.T @ (-np.sign(y) / (1 + np.exp(np.sign(y) * (X @ found.w)))) / 400
    assert np.abs(z).max() <= 0.004 + 1e-9
    at = found.w != 0
    np.testing.assert_allclose(z[at], -0.004 * np.sign(found.w[at]), atol=1e-9)


def test_blocks_with_their_zeros_add_up_to_the_same_second_derivatives():
    rng = np.random.default_rng(0)
    dense = rng.standard_normal((9000, 20))
    curves = rng.random(9000)
    found = newton.hessian(Rows.of(dense), curves)
    np.testing.assert_allclose(found, dense.T @ (curves[:, None] * dense), rtol=1e-10, atol=1e-10)
    thin = np.where(rng.random((9000, 20)) < 0.1, dense, 0)
    found = newton.hessian(Rows.of(thin), curves)
    np.testing.assert_allclose(found, thin.T @ (curves[:, None] * thin), rtol=1e-10, atol=1e-10)


def test_features_that_are_zero_or_missing_get_the_weight_zero():
    X, y = _drawn(100, 9, 0.5, seed=13)
    X = X.tolil()
    X[:, [2, 7]] = 0
    for strengths in ({}, *PENALTIES.values()):
        for loss in LOSSES:
            labels = y if loss == "squared" else np.sign(y)
            w = fit(X.tocsr(), labels, loss=loss, **strengths).w
            assert w[2] == 0
            assert w[7] == 0
            assert np.isfinite(w).all()


def test_rows_without_numbers_count():
    X = sparse.csr_matrix([[1.0], [0.0], [0.0], [-1.0]])
    found = fit(X, [1, 1, 0, 0], l2=1e-3, tol=1e-12)
    assert found.objective > np.log(2) / 2


def test_no_features_and_one():
    found = fit(np.zeros((3, 0)), [0, 1, 1], l1=0.1)
    assert (found.objective, found.gap) == (pytest.approx(np.log(2)), pytest.approx(0, abs=1e-15))
    assert found.w.shape == (0,)
    one = fit(np.array([[2.0], [-1.0]]), [4.0, -2.0], loss="squared")
    assert one.w[0] == pytest.approx(2.0)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 1e140])
@pytest.mark.parametrize("loss", LOSSES)
def test_one_feature_of_another_scale_changes_nothing_where_it_is_not_penalised(scale, loss):
    X, y = _drawn(200, 6, 0.6, seed=15)
    y = y if loss == "squared" else np.sign(y)
    wide = X @ sparse.diags([1, 1, scale, 1, 1, 1])
    plain = fit(X, y, loss=loss, tol=1e-9)
    found = fit(wide, y, loss=loss, tol=1e-9, max_rounds=100)
    assert found.objective == pytest.approx(plain.objective, abs=1e-9)


@pytest.mark.parametrize("strengths", [{"l1": 0.01}, {"l2": 0.01}])
def test_a_huge_feature_is_as_one_whose_weight_costs_nothing(strengths):
    X, y = _drawn(200, 6, 0.6, seed=15)
    wide = X @ sparse.diags([1, 1, 1e30, 1, 1, 1])
    free = X @ sparse.diags([1, 1, 1e6, 1, 1, 1])
    found = fit(wide, np.sign(y), max_rounds=100, **strengths)
    assert found.objective == pytest.approx(fit(free, np.sign(y), **strengths).objective, abs=1e-7)


def test_labels_of_one_class_and_equal_rows_do_no_harm_to_the_solver():
    X, _ = _drawn(50, 5, 0.5, seed=17)
    for loss in LOSSES:
        for penalty in ({"l1": 0.01}, {"l2": 0.01}):
            objective = Objective(loss=loss, penalty=Penalty(**penalty))
            shard = Shard(objective=objective, rows=Rows.of(X), y=np.ones(50))
            found = newton.solve(shard, tol=1e-10)
            assert found.certificate.gap <= 1e-10


def test_the_largest_l1_that_leaves_a_weight():
    X, y = _drawn(100, 9, 0.5, seed=19)
    y = np.sign(y)
    edge = np.abs(X.T @ y).max() / 2 / 100
    assert not fit(X, y, l1=edge * (1 + 1e-9)).w.any()
    assert fit(X, y, l1=edge * 0.99).w.any()


def test_float32_and_rows_and_column_order_are_taken():
    X, y = _drawn(100, 9, 0.5, seed=21)
    X = X.astype(np.float32)
    plain = fit(X.astype(float), np.sign(y), l1=0.01, tol=1e-12)
    shuffled = X.tocsr()
    shuffled.has_sorted_indices = False
    shuffled.indices, shuffled.data = shuffled.indices.copy(), shuffled.data.copy()
    for i in range(100):
        part = slice(shuffled.indptr[i], shuffled.indptr[i + 1])
        shuffled.indices[part] = shuffled.indices[part][::-1]
        shuffled.data[part] = shuffled.data[part][::-1]
    shuffled.has_canonical_format = False
    for each in (X, Rows.of(X), X.toarray(), X.tocsc(), shuffled):
        assert fit(each, np.sign(y), l1=0.01, tol=1e-12).objective == pytest.approx(
            plain.objective, abs=1e-12
        )


@pytest.mark.parametrize("labels", [["a", "b"], [0, 1], [5, 7], [False, True], [-1.0, 1.0]])
def test_the_larger_class_stands_for_one(labels):
    found = fit(np.array([[-1.0], [1.0]]), labels, l2=0.1)
    assert found.w[0] > 0
    assert list(found.classes) == labels


def test_it_says_what_was_not_reached():
    X, y = _drawn(200, 30, 0.5, seed=23)
    found = fit(X, np.sign(y), l1=1e-3, tol=1e-12, max_rounds=1)
    assert not found.converged
    assert "1e-12 was asked for" in str(found)
    assert "1 round" in str(found)
    assert pr.linear.fit is fit


GOOD = {"X": np.eye(2), "y": [0, 1]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loss": "logistics"}, r'loss: "logistics" is not a loss. Legal: logistic, '),
        ({"loss": 3}, "loss: 3 is not a loss"),
        ({"l1": -1.0}, r"l1: -1.0 is not a strength. Legal: 0 or a finite number above 0"),
        ({"l2": np.nan}, "l2: nan"),
        ({"group_l1": np.inf}, "group_l1: inf"),
        ({"l1": True}, "l1: true"),
        ({"group_size": 0}, "group_size: 0"),
        ({"group_size": 1.5}, "group_size: 1.5"),
        ({"gamma": 0.0}, "gamma: 0.0 is not above 0"),
        ({"tol": 0.0}, "tol: 0.0 is not above 0"),
        ({"max_rounds": 0}, "max_rounds: 0"),
        ({"X": np.zeros((0, 3)), "y": []}, "has no rows"),
        ({"X": np.zeros(3)}, "1 dimensions"),
        ({"X": [[1.0], [2.0, 3.0]]}, "is not an array of numbers"),
        ({"X": [["a"], ["b"]]}, "is not an array of numbers"),
        ({"X": np.eye(2) * 1j}, "is not a type of real numbers"),
        ({"X": [[1.0, 2.0], [3.0, np.nan]]}, "X: nan at row 1, column 1 is not finite"),
        ({"X": sparse.csc_matrix([[0, -np.inf], [1.0, 0]])}, "at row 0, column 1 is not finite"),
        ({"X": [[1.0, 1e200], [0.0, 0.0]]}, r"X\[:, 1\]: 1e\+200 is so large"),
        ({"y": [0, 1, 1]}, r"y: \[3\] is not the shape of labels of 2 rows"),
        ({"y": [[0, 1]]}, "is not the shape"),
        ({"y": [1, 1]}, r"has 1 classes \(1\). Legal: labels of exactly two classes"),
        ({"X": np.eye(3), "y": ["c", "a", "b"]}, r"has 3 classes \(a, b, c\)"),
        ({"y": [0.0, np.nan]}, r"y\[1\]: nan is not finite"),
        ({"y": np.array([1, "a"], dtype=object)}, "cannot be sorted"),
        ({"y": ["a", "b"], "loss": "squared"}, "is not finite numbers"),
        ({"y": [np.inf, 0.0], "loss": "squared"}, r"y\[0\]: inf"),
    ],
)
def test_what_is_wrong_is_named(wrong, said):
    with pytest.raises(ConfigError, match=said):
        fit(**{**GOOD, **wrong})


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as raised:
        fit(**GOOD, l1=-1, l2=-1, tol=0)
    assert [each.path for each in raised.value.violations] == ["l1", "l2", "tol"]


def test_groups_of_features_of_unlike_scales():
    X, _ = _drawn(56, 88, 0.3, seed=25)
    rng = np.random.default_rng(25)
    X = X @ sparse.diags(10.0 ** rng.uniform(-3, 3, 88))
    y = X @ (rng.standard_normal(88) * (rng.random(88) < 0.3)) + rng.standard_normal(56)
    found = fit(X, y, loss="squared", group_l1=1e-4, group_size=3, tol=1e-8, max_rounds=30)
    assert found.converged, str(found)
