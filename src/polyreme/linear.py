"""Linear models fitted on one core, each with a certificate of how good it is.

>>> import numpy as np
>>> found = fit(np.array([[1.0], [2.0], [-1.0]]), ["yes", "yes", "no"], l2=0.1)
>>> found.gap <= 1e-8, list(found.classes)
(True, [np.str_('no'), np.str_('yes')])

There is no intercept: a column of ones does what one would, and is penalised like the others.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .convex import loss as losses
from .convex import newton, passes
from .convex.problem import Certificate, Objective, Penalty
from .convex.shard import Shard
from .data.rows import Rows
from .errors import ConfigError, Violation, nearest_first


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Weights [D], how good they are, and after how many Newton steps.

    `classes` are the two that labels -1 and 1 stand for; None where labels are numbers.
    """

    w: np.ndarray
    certificate: Certificate
    rounds: int
    tol: float
    classes: np.ndarray | None

    @property
    def objective(self) -> float:
        """The mean loss plus the penalty."""
        return float(self.certificate.objective)

    @property
    def gap(self) -> float:
        """The objective is at most this far above its least; infinite without a penalty."""
        return max(0.0, float(self.certificate.gap))

    @property
    def converged(self) -> bool:
        """Whether the gap, or without a penalty the gradient's largest entry, is within `tol`."""
        reached = self.gap if math.isfinite(self.gap) else self.certificate.gradient
        return reached <= self.tol

    def __str__(self) -> str:
        if math.isfinite(self.gap):
            good = f"at most {self.gap:.2g} above the least (duality gap)"
        else:
            good = f"largest entry of the gradient {self.certificate.gradient:.2g} (no penalty)"
        ended = "" if self.converged else f"; {self.tol:.2g} was asked for"
        used = f"{np.count_nonzero(self.w)} of {len(self.w)} weights are not 0"
        return f"objective {self.objective:.12g}, {good}{ended}; {used}; {self.rounds} rounds"


def fit(
    X: Any,
    y: Any,
    *,
    loss: losses.Loss = "logistic",
    l1: float = 0.0,
    l2: float = 0.0,
    group_l1: float = 0.0,
    group_size: int = 1,
    gamma: float = 0.5,
    tol: float = 1e-8,
    max_rounds: int = 1000,
) -> Fit:
    """Minimise mean loss(x w, y) + l1 |w|_1 + group_l1 sum_g |w_g|_2 + l2/2 |w|_2^2.

    `X` [N, D] is an array, a sparse matrix of scipy, or Rows. `y` [N] has two classes of any
    kind, of which the larger stands for 1, or numbers for the loss "squared". The loss "hinge" is
    rounded over `gamma`. `tol` is the duality gap that is asked for, without a penalty the
    gradient's largest entry. A feature that is 0 throughout gets the weight 0.

    Raises:
        ConfigError: An argument is wrong, or X or y holds what is no finite number.
    """
    penalty = Penalty(l1=l1, l2=l2, group_l1=group_l1, group_size=group_size)
    wrong = _options(loss, penalty, gamma, tol, max_rounds)
    if wrong:
        raise ConfigError(wrong)
    objective = Objective(loss=loss, gamma=gamma, penalty=penalty)
    rows = _rows(X, losses.sharpest(objective.code, gamma))
    labels, classes = _labels(y, len(rows), objective.classifies)
    shard = Shard(objective=objective, rows=rows, y=labels)
    found = newton.solve(shard, tol=tol, max_rounds=max_rounds)
    return Fit(
        w=found.w,
        certificate=found.certificate,
        rounds=found.rounds,
        tol=tol,
        classes=classes,
    )


def _options(loss: Any, penalty: Penalty, gamma: Any, tol: Any, max_rounds: Any) -> list[Violation]:
    wrong = []

    def held(path: str, value: Any, holds: bool, rule: str, legal: str) -> None:
        if not holds:
            wrong.append(Violation(path=path, value=value, rule=rule, legal=legal))

    names = list(losses.CODES)
    known = isinstance(loss, str) and loss in names
    near = nearest_first(loss, names) if isinstance(loss, str) else names
    held("loss", loss, known, "is not a loss", ", ".join(near))
    for name in ("l1", "l2", "group_l1"):
        value = getattr(penalty, name)
        fine = _number(value) and value >= 0
        held(name, value, fine, "is not a strength", "0 or a finite number above 0")
    size = penalty.group_size
    held("group_size", size, _count(size), "is not a size", "1, 2, 3, ...")
    for name, value in (("gamma", gamma), ("tol", tol)):
        held(name, value, _number(value) and value > 0, "is not above 0", "a finite number above 0")
    held("max_rounds", max_rounds, _count(max_rounds), "is not a number of rounds", "1, 2, 3, ...")
    return wrong


def _number(value: Any) -> bool:
    plain = isinstance(value, int | float | np.integer | np.floating)
    return plain and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(value >= 1)


def _refused(path: str, value: Any, rule: str, legal: str) -> ConfigError:
    return ConfigError([Violation(path=path, value=value, rule=rule, legal=legal)])


def _rows(X: Any, sharpest: float) -> Rows:
    from scipy import sparse

    if isinstance(X, Rows):
        rows = X
    else:
        if not sparse.issparse(X):
            try:
                X = np.asarray(X)
                X = X.astype(float) if X.dtype.kind not in "fiubc" else X
            except (TypeError, ValueError) as error:
                raise _refused("X", None, f"is not an array of numbers ({error})", _X) from None
        if X.ndim != 2:
            raise _refused("X", list(X.shape), f"has {X.ndim} dimensions", _X)
        if X.dtype.kind not in "fiub":
            raise _refused("X", str(X.dtype), "is not a type of real numbers", _X)
        rows = Rows.of(X)
    if not len(rows):
        raise _refused("X", [0, rows.n_features], "has no rows", "one row or more")
    largest = _largest(rows, np.abs(rows.values).max(initial=0.0))
    # Sums of squares times the loss's largest second derivative are what steps are made of.
    if float(largest) > math.sqrt(sys.float_info.max / len(rows) / max(1.0, sharpest)):
        _check_squares(rows, sharpest)
    return rows


_X = "N rows of D finite numbers: an array, a sparse matrix of scipy, or Rows"


def _largest(rows: Rows, largest: np.floating) -> np.floating:
    if np.isfinite(largest):
        return largest
    at = int(np.flatnonzero(~np.isfinite(rows.values))[0])
    row = int(np.searchsorted(rows.indptr, at + rows.indptr[0], side="right")) - 1
    where = f"at row {row}, column {rows.indices[at]} is not finite"
    raise _refused("X", float(rows.values[at]), where, "finite numbers")


def _check_squares(rows: Rows, sharpest: float) -> None:
    ones = np.full(len(rows), max(1.0, sharpest))
    with np.errstate(over="ignore"):
        sums = passes.squares(rows.indptr, rows.indices, rows.values, ones, rows.n_features)
    if not np.isfinite(sums).all():
        feature = int(np.flatnonzero(~np.isfinite(sums))[0])
        largest = float(np.abs(rows.values[rows.indices == feature]).max())
        raise _refused(
            f"X[:, {feature}]",
            largest,
            "is so large that the squares of this feature add up to more than float64 holds",
            "features scaled to where their squares can be added up, below about 1e150",
        )


def _labels(y: Any, n: int, classifies: bool) -> tuple[np.ndarray, np.ndarray | None]:
    y = np.asarray(y)
    if y.shape != (n,):
        raise _refused("y", list(y.shape), f"is not the shape of labels of {n} rows", f"[{n}]")
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        row = int(np.flatnonzero(~np.isfinite(y))[0])
        raise _refused(f"y[{row}]", float(y[row]), "is not finite", "a finite number, or a class")
    if not classifies:
        try:
            found = y.astype(float) if y.dtype.kind != "c" else None
        except (TypeError, ValueError):
            found = None
        if found is None or not np.isfinite(found).all():
            raise _refused("y", None, 'is not finite numbers, as the loss "squared" asks for', "-")
        return found, None
    try:
        classes = np.unique(y)
    except TypeError as error:
        raise _refused("y", None, f"has labels that cannot be sorted ({error})", _TWO) from None
    if len(classes) != 2:
        some = ", ".join(str(each) for each in classes[:5]) + (", ..." if len(classes) > 5 else "")
        raise _refused("y", None, f"has {len(classes)} classes ({some})", _TWO)
    return np.where(y == classes[1], 1.0, -1.0), classes


_TWO = "labels of exactly two classes"
