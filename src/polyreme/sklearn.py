"""Estimators for scikit-learn, fitted to a duality gap by `polyreme.linear`.

They differ from those of scikit-learn in that no intercept is fitted unless asked for, and one
that is asked for is penalised (as by liblinear); that `tol` is a duality gap of the mean loss; that
a hinge is rounded; and that there are no sample or class weights.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Self

import numpy as np
from scipy import sparse
from scipy.special import expit, log_expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from .errors import ConfigError, undefined
from .linear import Fit, fit


class _Linear(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """What both estimators do; each says its loss and how its penalty is made."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _loss(self) -> dict[str, Any]:
        raise undefined(self, "_loss")

    def _penalty(self, n: int) -> dict[str, Any]:
        """Strengths for n rows: C times a sum of losses is n C times their mean."""
        if not (isinstance(self.C, int | float | np.number) and self.C > 0):
            raise ValueError(f"C: {self.C!r} is not above 0. Legal: a number above 0.")
        strength = 1.0 / (n * float(self.C))
        ratios = {"l1": 1.0, "l2": 0.0, "elasticnet": self.l1_ratio}
        if self.penalty is None or math.isinf(self.C):
            return {}
        if self.penalty not in ratios:
            raise ValueError(
                f"penalty: {self.penalty!r} is none. Legal: 'l1', 'l2', 'elasticnet', None."
            )
        ratio = ratios[self.penalty]
        if not (isinstance(ratio, int | float | np.number) and 0 <= ratio <= 1):
            raise ValueError(f"l1_ratio: {ratio!r} is no share. Legal: from 0 to 1.")
        return {"l1": float(ratio) * strength, "l2": (1.0 - float(ratio)) * strength}

    def fit(self, X: Any, y: Any) -> Self:
        """Fit one model, or one of each class against the rest where there are more than two."""
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_, which = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y has one class, {self.classes_[0]!r}; two or more are needed")
        if self.fit_intercept:
            X = self._with_ones(X)
        ones = [1] if len(self.classes_) == 2 else range(len(self.classes_))
        found = [self._one(X, np.where(which == each, 1.0, -1.0)) for each in ones]
        w = np.stack([each.w for each in found])
        self.coef_ = w[:, :-1] if self.fit_intercept else w
        self.intercept_ = np.zeros(len(w))
        if self.fit_intercept:
            self.intercept_ = w[:, -1] * self.intercept_scaling
        self.n_iter_ = np.array([max(1, each.rounds) for each in found], np.int32)
        self.gap_ = np.array([each.gap for each in found])
        return self

    def _one(self, X: Any, y: np.ndarray) -> Fit:
        try:
            found = fit(
                X,
                y,
                **self._loss(),
                **self._penalty(X.shape[0]),
                tol=self.tol,
                max_rounds=self.max_iter,
            )
        except ConfigError as error:  # what scikit-learn expects of wrong input
            raise ValueError(str(error)) from error
        if not found.converged:
            warnings.warn(str(found), ConvergenceWarning, stacklevel=3)
        return found

    def _with_ones(self, X: Any) -> Any:
        ones = np.full((X.shape[0], 1), float(self.intercept_scaling))
        return sparse.hstack([X, ones], "csr") if sparse.issparse(X) else np.hstack([X, ones])

    def decision_function(self, X: Any) -> np.ndarray:
        """Predictions [N], or [N, classes] where there are more than two."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        found: np.ndarray = np.asarray(X @ self.coef_.T) + self.intercept_
        return found[:, 0] if found.shape[1] == 1 else found

    def predict(self, X: Any) -> np.ndarray:
        """The class [N] of each row."""
        found = self.decision_function(X)
        which = (found > 0).astype(int) if found.ndim == 1 else found.argmax(axis=1)
        classes: np.ndarray = self.classes_[which]
        return classes


class LogisticRegression(_Linear):
    """C sum log(1 + exp(-y x w)) + R(w) at its least.

    R is |w|_2^2 / 2 for penalty "l2", |w|_1 for "l1", l1_ratio |w|_1 + (1 - l1_ratio) |w|_2^2 / 2
    for "elasticnet", and 0 for None. `gap_` is the duality gap of the mean loss, a class each.
    """

    def __init__(
        self,
        penalty: str | None = "l2",
        *,
        C: float = 1.0,
        l1_ratio: float = 0.0,
        tol: float = 1e-8,
        max_iter: int = 1000,
        fit_intercept: bool = False,
        intercept_scaling: float = 1.0,
    ) -> None:
        self.penalty = penalty
        self.C = C
        self.l1_ratio = l1_ratio
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling

    def _loss(self) -> dict[str, Any]:
        return {"loss": "logistic"}

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [N, classes]; of more than two, each against the rest, made to sum to 1."""
        found = self.decision_function(X)
        if found.ndim == 1:
            return np.stack([expit(-found), expit(found)], axis=1)
        shares: np.ndarray = np.exp(self._log_shares(found))
        return shares

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms."""
        found = self.decision_function(X)
        if found.ndim == 1:
            return np.stack([log_expit(-found), log_expit(found)], axis=1)
        return self._log_shares(found)

    @staticmethod
    def _log_shares(found: np.ndarray) -> np.ndarray:
        from scipy.special import logsumexp

        each = log_expit(found)
        shares: np.ndarray = each - logsumexp(each, axis=1, keepdims=True)
        return shares


class LinearSVC(_Linear):
    """C sum loss(x w, y) + R(w) at its least, R as for LogisticRegression.

    The loss is max(0, 1 - m)^2 for "squared_hinge", m = y x w; for "hinge" it is max(0, 1 - m),
    rounded to a parabola where m is between 1 - gamma and 1.
    """

    def __init__(
        self,
        penalty: str | None = "l2",
        loss: str = "squared_hinge",
        *,
        C: float = 1.0,
        l1_ratio: float = 0.0,
        gamma: float = 0.5,
        tol: float = 1e-8,
        max_iter: int = 1000,
        fit_intercept: bool = False,
        intercept_scaling: float = 1.0,
    ) -> None:
        self.penalty = penalty
        self.loss = loss
        self.C = C
        self.l1_ratio = l1_ratio
        self.gamma = gamma
        self.tol = tol
        self.max_iter = max_iter
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling

    def _loss(self) -> dict[str, Any]:
        if self.loss not in ("hinge", "squared_hinge"):
            raise ValueError(f"loss: {self.loss!r} is none. Legal: 'hinge', 'squared_hinge'.")
        return {"loss": self.loss, "gamma": self.gamma}
