"""One worker's rows, and what it answers of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..data.rows import Rows
from . import kernels, passes
from .loss import sharpest
from .problem import Certificate, Objective, certificate


@dataclass(frozen=True, kw_only=True)
class Slopes:
    """At a model: the gradient [D] of the summed loss, each row's slope [N], the summed loss."""

    gradient: np.ndarray
    slopes: np.ndarray
    loss: float


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Rows and their labels (float64 [N]) under an objective."""

    objective: Objective
    rows: Rows
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, n: int) -> Shard:
        """Up to so many of the rows, evenly spread."""
        if len(self) <= n:
            return self
        which = np.arange(n) * len(self) // n
        return Shard(objective=self.objective, rows=self.rows.take(which), y=self.y[which])

    @property
    def given(self) -> tuple[int, float, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What every kernel begins with."""
        rows, objective = self.rows, self.objective
        return objective.code, objective.gamma, rows.indptr, rows.indices, rows.values, self.y

    @cached_property
    def columns(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows by feature, see `passes.columns`: a copy, made when it is first asked for."""
        rows = self.rows
        made: tuple[np.ndarray, np.ndarray, np.ndarray] = passes.columns(
            rows.indptr, rows.indices, rows.values, rows.n_features
        )
        return made

    @property
    def by_feature(self) -> tuple[int, float, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """What every kernel over features begins with."""
        return self.objective.code, self.objective.gamma, *self.columns, self.y

    def at(self, w: np.ndarray) -> Slopes:
        """Gradient, slopes and loss at a model [D]."""
        gradient, slopes, loss = kernels.gradient(*self.given, w)
        return Slopes(gradient=gradient, slopes=slopes, loss=float(loss))

    def bounds(self, start: int, stop: int) -> np.ndarray:
        """A diagonal above the summed loss's Hessian of features `start` to `stop`, at any model.

        Source: a matrix of |a_jk| is below the diagonal of its rows' sums (Gershgorin).
        """
        code, gamma, indptr, indices, values, _ = self.given
        found = kernels.row_sums(indptr, indices, values, start, stop)
        bounds: np.ndarray = sharpest(code, gamma) * found
        return bounds

    def loss(self, w: np.ndarray) -> float:
        """The summed loss."""
        return float(kernels.losses(*self.given, w))

    def conjugates(self, slopes: np.ndarray, c: float) -> float:
        """The summed conjugates at c times the slopes."""
        code, gamma, *_ = self.given
        return float(kernels.conjugates(code, gamma, slopes, self.y, c))

    def certificate(self, w: np.ndarray) -> Certificate:
        """Of these rows alone."""
        here, n = self.at(w), max(1, len(self))
        z = here.gradient / n
        c = self.objective.penalty.shrink(z)
        return certificate(self.objective, w, z, here.loss / n, self.conjugates(here.slopes, c) / n)
