"""Estimators of polyreme.sklearn: what scikit-learn asks of any, and its own answers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from scipy import sparse
from sklearn import linear_model, svm
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import scale
from sklearn.utils.estimator_checks import parametrize_with_checks

from polyreme.sklearn import LinearSVC, LogisticRegression


@parametrize_with_checks([LogisticRegression(), LinearSVC()])
def test_what_scikit_learn_asks_of_an_estimator(estimator, check):
    check(estimator)


def _cancer() -> tuple[np.ndarray, np.ndarray]:
    X, y = load_breast_cancer(return_X_y=True)
    return scale(X), y


@pytest.mark.parametrize("penalty", ["l1", "l2"])
@pytest.mark.parametrize("fit_intercept", [False, True])
def test_coefficients_are_those_of_liblinear(penalty, fit_intercept):
    X, y = _cancer()
    peer = linear_model.LogisticRegression(
        l1_ratio=float(penalty == "l1"),
        C=0.3,
        solver="liblinear",
        tol=1e-12,
        max_iter=10000,
        fit_intercept=fit_intercept,
        intercept_scaling=2.0,
    ).fit(X, y)
    ours = LogisticRegression(
        penalty, C=0.3, tol=1e-13, fit_intercept=fit_intercept, intercept_scaling=2.0
    ).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-6)
    np.testing.assert_allclose(ours.intercept_, np.ravel(peer.intercept_), atol=1e-6)
    np.testing.assert_allclose(ours.predict_proba(X), peer.predict_proba(X), atol=1e-6)
    assert ours.score(X, y) == peer.score(X, y)


def test_elastic_net_is_that_of_saga():
    X, y = _cancer()
    peer = linear_model.LogisticRegression(
        l1_ratio=0.4, C=0.05, solver="saga", tol=1e-12, max_iter=100000, fit_intercept=False
    ).fit(X, y)
    ours = LogisticRegression("elasticnet", l1_ratio=0.4, C=0.05, tol=1e-13).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-7)


@pytest.mark.parametrize("penalty", ["l1", "l2"])
def test_squared_hinge_is_that_of_linear_svc(penalty):
    X, y = _cancer()
    peer = svm.LinearSVC(
        penalty=penalty, C=0.01, dual=False, tol=1e-8, max_iter=100000, fit_intercept=False
    ).fit(X, y)
    ours = LinearSVC(penalty, C=0.01, tol=1e-14).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-6)


def test_a_hinge_hardly_rounded_is_that_of_linear_svc():
    X, y = _cancer()
    peer = svm.LinearSVC(loss="hinge", C=0.01, tol=1e-10, max_iter=10**6, fit_intercept=False)
    peer.fit(X, y)
    ours = LinearSVC(loss="hinge", C=0.01, gamma=1e-4, tol=1e-12).fit(X, y)
    np.testing.assert_allclose(ours.coef_, peer.coef_, atol=1e-3)


def test_each_class_against_the_rest_and_probabilities_that_sum_to_one():
    X, y = load_digits(return_X_y=True)
    names = np.array([f"digit {each}" for each in range(10)])
    ours = LogisticRegression(C=0.01).fit(X / 16, names[y])
    assert ours.coef_.shape == (10, 64)
    assert ours.n_iter_.shape == (10,)
    for at in (0, 7):
        alone = LogisticRegression(C=0.01).fit(X / 16, y == at)
        np.testing.assert_allclose(ours.coef_[at], alone.coef_[0], atol=1e-12)
    shares = ours.predict_proba(X / 16)
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    np.testing.assert_allclose(np.exp(ours.predict_log_proba(X / 16)), shares)
    assert (ours.predict(X / 16) == ours.classes_[shares.argmax(axis=1)]).all()


def test_probabilities_of_far_rows_have_finite_logarithms():
    ours = LogisticRegression(C=100).fit([[-1.0], [1.0]], [0, 1])
    far = ours.predict_log_proba([[1e4], [-1e4]])
    assert np.isfinite(far).all()
    assert far[0, 0] < -1e4


def test_sparse_and_dense_rows_give_the_same():
    X, y = _cancer()
    X = np.where(np.abs(X) < 1, 0, X)
    dense = LinearSVC("l1", C=0.1).fit(X, y)
    for kind in (sparse.csr_matrix, sparse.csc_array, sparse.coo_matrix):
        found = LinearSVC("l1", C=0.1).fit(kind(X), y)
        np.testing.assert_allclose(found.coef_, dense.coef_, atol=1e-12)
        assert (found.predict(kind(X)) == dense.predict(X)).all()


def test_clones_pickles_and_searches():
    X, y = _cancer()
    search = GridSearchCV(LogisticRegression("l1"), {"C": [0.01, 0.1, 1.0]}, cv=3).fit(X, y)
    assert search.best_score_ > 0.9
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert (again.predict(X) == search.predict(X)).all()
    assert clone(again).get_params() == again.get_params()
    assert not hasattr(clone(again), "coef_")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"C": -1.0}, "C: -1.0"),
        ({"penalty": "l3"}, "'l1', 'l2', 'elasticnet'"),
        ({"penalty": "elasticnet", "l1_ratio": 2.0}, "l1_ratio: 2.0"),
        ({"tol": 0.0}, "tol: 0.0"),
        ({"loss": "hing"}, "'hinge', 'squared_hinge'"),
    ],
)
def test_wrong_parameters_are_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        LinearSVC(**wrong).fit([[0.0], [1.0]], [0, 1])


def test_too_few_iterations_are_warned_of():
    X, y = _cancer()
    with pytest.warns(ConvergenceWarning, match="was asked for"):
        LogisticRegression(C=1e4, max_iter=1).fit(X, y)
