"""Rows whose leading directions are sought, as algorithms ask for them: vectors of torch.

Axes: D features, K components.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy import linalg

from ..algo.task import Steps
from ..data.rows import Rows
from ..data.source import Source
from . import kernels, pca
from .problem import Certificate
from .samples import rows_of
from .sums import Unbounded
from .task import Here

if TYPE_CHECKING:
    from scipy import sparse


@dataclass(frozen=True, kw_only=True)
class Components:
    """The objective of principal components, see `pca`: so many of the rows' second moment.

    `center` says whether the rows' mean is taken from them first.
    """

    components: int
    center: bool = True

    @property
    def figures(self) -> tuple[str, ...]:
        """What an evaluation tells of a certificate."""
        return ("objective", "gradient")

    def samples(self, source: Source) -> RowSamples:
        """All training rows; labels are left out."""
        rows = rows_of(source)
        mean = rows.scipy().mean(axis=0) if self.center else np.zeros(0)
        centre = np.ascontiguousarray(mean, dtype=float).reshape(-1)
        return RowSamples(components=self.components, rows=rows, centre=centre)


@dataclass(frozen=True, kw_only=True)
class RowSamples:
    """See `sums.Samples`. `centre` [D] is what rows are less; if it is empty, they are as is."""

    components: int
    rows: Rows
    centre: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def constants(self) -> dict[str, np.ndarray]:
        """The mean, under which the model has it."""
        return {"mean": self.centre} if len(self.centre) else {}

    def task(self, which: np.ndarray, batch: int) -> RowTask:
        """Of these rows."""
        rows = self.rows.take(which)
        return RowTask(components=self.components, rows=rows, batch=batch, centre=self.centre)

    def gradient(self, which: np.ndarray, w: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Of -1/(2n) sum_i |Q^T x_i|^2 by W, where Q are W's columns made orthonormal.

        So steps of any rule stay of use without a constraint: only the span of W counts.
        """
        task, n = self.task(which, 1), len(which)
        q, r = np.linalg.qr(task.matrix(w))
        ascent, total = task.moment(q)
        ascent = ascent - q @ (q.T @ ascent)
        gradient = -linalg.solve_triangular(r, ascent.T, check_finite=False).T
        return torch.from_numpy(gradient.reshape(-1) / max(1, n)), -total / 2


@dataclass(frozen=True, kw_only=True)
class RowTask(Unbounded):
    """See `algo.task.Sum`. `batch` are the rows of one of the worker's batches.

    `centre` [D] is what rows are less; if it is empty, they are as they are.
    """

    components: int
    rows: Rows
    batch: int
    centre: np.ndarray = field(default_factory=lambda: np.zeros(0))

    @property
    def n_own(self) -> int:
        """Rows of this worker."""
        return len(self.rows)

    @property
    def l2(self) -> float:
        """There is none."""
        return 0.0

    @cached_property
    def _sparse(self) -> sparse.csr_matrix:
        return self.rows.scipy()

    def matrix(self, w: torch.Tensor) -> np.ndarray:
        """W [D, K] of a model."""
        found: np.ndarray = w.numpy().reshape(-1, self.components)
        return found

    def moment(self, w: np.ndarray) -> tuple[np.ndarray, float]:
        """sum_i x_i x_i^T W [D, K], and sum_i |W^T x_i|^2."""
        predictions = self._sparse @ w
        if not len(self.centre):
            return self._sparse.T @ predictions, float((predictions * predictions).sum())
        predictions = predictions - self.centre @ w
        moment = self._sparse.T @ predictions - np.outer(self.centre, predictions.sum(0))
        return moment, float((predictions * predictions).sum())

    def batches(self, n_samples: int) -> float:
        """Of so many rows."""
        return n_samples / self.batch

    def at(self, w: torch.Tensor) -> Here:
        """One pass over the rows; there is no use for slopes."""
        ascent, total = self.moment(self.matrix(w))
        gradient = torch.from_numpy(-ascent.reshape(-1))
        return Here(gradient=gradient, slopes=gradient[:0], loss=-total / 2)

    def loss(self, w: torch.Tensor) -> float:
        """One pass over the rows."""
        return -self.moment(self.matrix(w))[1] / 2

    def prox(self, w: torch.Tensor, eta: float) -> torch.Tensor:
        """The nearest with orthonormal columns."""
        return self.nearest(w)

    def nearest(self, w: torch.Tensor) -> torch.Tensor:
        """The nearest with orthonormal columns; what is not finite stays so."""
        if not bool(torch.isfinite(w).all()):
            return w
        return torch.from_numpy(linalg.polar(self.matrix(w))[0].reshape(-1))

    def certificate(
        self, w: torch.Tensor, z: torch.Tensor, mean_loss: float, conjugates: float
    ) -> Certificate:
        """Of W's span. The gradient is the largest entry of C Q - Q Q^T C Q, with C the moment."""
        if not bool(torch.isfinite(w).all() and torch.isfinite(z).all()):
            return Certificate(objective=math.nan, gap=math.inf, gradient=math.nan)
        q, r = np.linalg.qr(self.matrix(w))
        cq = -linalg.solve_triangular(r, self.matrix(z).T, trans="T").T
        inner = q.T @ cq
        left = np.abs(cq - q @ inner).max()
        return Certificate(
            objective=-float(np.trace(inner)) / 2, gap=math.inf, gradient=float(left)
        )

    def steps(self, asked: Steps) -> torch.Tensor:
        """Rows are drawn with replacement; infinite where columns became dependent."""
        if not self.n_own:
            return asked.start
        order = np.random.default_rng(asked.seed).integers(0, self.n_own, asked.n)
        anchor = asked.start if asked.anchor is None else asked.anchor
        found, fine = pca.walked(
            self.rows.indptr,
            self.rows.indices,
            self.rows.values,
            self.matrix(asked.start),
            self.matrix(anchor),
            self.matrix(asked.b),
            self.centre,
            order,
            asked.eta,
            asked.mu,
            asked.mean,
        )
        model = torch.from_numpy(found.reshape(-1))
        return model if fine else torch.full_like(model, math.inf)

    def _longest(self) -> float:
        """The largest squared norm of a row less the centre."""
        if not len(self.centre):
            return float(kernels.longest_row(self.rows.indptr, self.rows.values))
        squares = self._sparse.multiply(self._sparse).sum(axis=1)
        norms = np.asarray(squares).ravel() - 2 * (self._sparse @ self.centre)
        return float((norms + self.centre @ self.centre).max(initial=0.0))

    def penalty(self, w: torch.Tensor) -> float:
        """Whatever is allowed costs nothing."""
        return 0.0

    def few(self, n: int, *, heavier: float = 1.0) -> RowTask:
        """Evenly spread; there is no penalty."""
        n = min(n, self.n_own)
        rows = self.rows.take(np.arange(n) * self.n_own // max(1, n))
        return RowTask(components=self.components, rows=rows, batch=self.batch, centre=self.centre)

    def smoothness(self, w: torch.Tensor) -> float:
        """The largest squared norm of a row less the centre."""
        return self._longest()
