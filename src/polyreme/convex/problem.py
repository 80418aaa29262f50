"""What is minimised: the mean loss of a linear model plus a penalty, with a certificate.

P(w) = 1/n sum_i loss(x_i w, y_i) + R(w),
R(w) = l1 |w|_1 + group_l1 sum_g |w_g|_2 + l2/2 |w|_2^2
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from . import loss as losses

if TYPE_CHECKING:
    from ..data.source import Source
    from .samples import LinearSamples


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """R. Groups are of `group_size` features that follow one another; the last may be smaller."""

    l1: float = 0.0
    l2: float = 0.0
    group_l1: float = 0.0
    group_size: int = 1

    def times(self, factor: float) -> Penalty:
        """Factor R."""
        l1, l2, group_l1 = factor * self.l1, factor * self.l2, factor * self.group_l1
        return replace(self, l1=l1, l2=l2, group_l1=group_l1)

    def value(self, w: np.ndarray) -> float:
        """R(w)."""
        found = self.l2 / 2 * float(w @ w)
        if self.l1:
            found += self.l1 * float(np.abs(w).sum())
        if self.group_l1:
            found += self.group_l1 * float(self._norms(w).sum())
        return found

    def prox(self, w: np.ndarray, eta: float) -> np.ndarray:
        """argmin_u R(u) + |u - w|^2 / (2 eta)."""
        u = np.sign(w) * np.maximum(np.abs(w) - eta * self.l1, 0.0) if self.l1 else w
        if self.group_l1:
            norms = self._norms(u)
            kept = np.maximum(norms - eta * self.group_l1, 0.0) / np.where(norms > 0, norms, 1.0)
            u = u * np.repeat(kept, self.group_size)[: len(u)]
        return u / (1.0 + eta * self.l2)

    def shrink(self, g: np.ndarray) -> float:
        """The largest c <= 1 with c g where R's conjugate is finite: 1 if there is an l2."""
        if self.l2 or not len(g):
            return 1.0
        if not self.group_l1:
            largest = float(np.abs(g).max())
            return 1.0 if largest <= self.l1 else self.l1 / largest
        if self._bounded(g):
            return 1.0
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._bounded(middle * g) else (low, middle)
        return low

    def conjugate(self, g: np.ndarray) -> float:
        """R*(g), for a g that `shrink` leaves as it is."""
        if not self.l2:
            return 0.0
        left = np.maximum(np.abs(g) - self.l1, 0.0)
        if self.group_l1:
            left = np.maximum(self._norms(left) - self.group_l1, 0.0)
        return float(left @ left) / (2 * self.l2)

    @property
    def bounds(self) -> bool:
        """Whether a duality gap can be had: without a penalty only a gradient's norm can."""
        return bool(self.l1 or self.l2 or self.group_l1)

    def _bounded(self, g: np.ndarray) -> bool:
        left = np.maximum(np.abs(g) - self.l1, 0.0)
        return bool((self._norms(left) <= self.group_l1).all())

    def _norms(self, w: np.ndarray) -> np.ndarray:
        starts = np.arange(0, len(w), self.group_size)
        norms: np.ndarray = np.sqrt(np.add.reduceat(w * w, starts)) if len(w) else w
        return norms


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A loss and a penalty; `gamma` is the width over which the hinge is rounded."""

    loss: losses.Loss = "logistic"
    gamma: float = 0.5
    penalty: Penalty = Penalty()

    @property
    def code(self) -> int:
        """The loss, as kernels know it."""
        return losses.CODES[self.loss]

    @property
    def classifies(self) -> bool:
        """Whether labels are the classes -1 and 1."""
        return self.loss != "squared"

    @property
    def figures(self) -> tuple[str, ...]:
        """What an evaluation tells of a certificate."""
        return ("objective", "gap", "gradient")

    def samples(self, source: Source) -> LinearSamples:
        """See `samples.samples`."""
        from .samples import samples

        return samples(source, self)


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How good a model is at the most: `objective` less `gap` is below the optimum.

    `gap` is infinite where there is no penalty; `gradient` is then what says how far it is, see
    `residual`.
    """

    objective: float
    gap: float
    gradient: float


def certificate(
    objective: Objective, w: np.ndarray, z: np.ndarray, mean_loss: float, conjugates: float
) -> Certificate:
    """From the mean loss's gradient `z` at `w`, and the mean conjugate at the slopes there.

    `conjugates` is the mean of the loss's conjugates at ``shrink(z)`` times each row's slope.
    Source: Shalev-Shwartz and Zhang 2013, equation 2 (the dual); Ndiaye et al. 2017, "Gap safe
    screening rules", section 2 (a point that is feasible by being made smaller).
    """
    penalty = objective.penalty
    whole = mean_loss + penalty.value(w)
    gap = math.inf
    if penalty.bounds:
        gap = whole + conjugates + penalty.conjugate(penalty.shrink(z) * -z)
    return Certificate(objective=whole, gap=gap, gradient=residual(penalty, w, z))


def residual(penalty: Penalty, w: np.ndarray, z: np.ndarray) -> float:
    """The largest entry of w - prox(w - z), which is 0 at an optimum and nowhere else."""
    if not len(w):
        return 0.0
    return float(np.abs(w - penalty.prox(w - z, 1.0)).max())
