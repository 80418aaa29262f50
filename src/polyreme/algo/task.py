"""What a worker can be asked of its own samples where the whole sum is seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Here(Protocol):
    """At a model w: gradient [D] and value of the loss, summed over samples; each one's slope."""

    @property
    def gradient(self) -> torch.Tensor:
        """Of all the worker's samples together."""

    @property
    def slopes(self) -> torch.Tensor:
        """The derivative of each sample's loss by its prediction."""

    @property
    def loss(self) -> float:
        """Of all the worker's samples together."""


class Certificate(Protocol):
    """The objective at a model, by how much it may be above the optimum, and what else tells.

    `gap` is infinite where nothing bounds it; `gradient` is the largest entry of w - prox(w - z).
    """

    @property
    def objective(self) -> float:
        """P(w)."""

    @property
    def gap(self) -> float:
        """P(w) is at most so much above its optimum."""

    @property
    def gradient(self) -> float:
        """0 at an optimum."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Variance-reduced steps from `start`, with the slopes at an anchor and its gradient `b`.

    Each draws a sample i of the worker's: u <- prox((1 - eta mu) u - eta (b + (its gradient at u
    less its gradient at the anchor))). `exact` says whether the penalty's prox is taken, or what
    it has of l2 is in `mu` and `b`. What is given is the last model, or the `mean` of all.
    `anchor` is the model that slopes and `b` are of (unset: `start`), for losses whose gradients
    slopes alone do not tell.
    """

    start: torch.Tensor
    slopes: torch.Tensor
    b: torch.Tensor
    n: int
    eta: float
    seed: Sequence[int]
    mu: float = 0.0
    exact: bool = True
    mean: bool = False
    anchor: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DualSteps:
    """Steps of dual coordinate ascent, n of them, on rows in passes of random order.

    `dual` is a variable for each of the worker's samples; v is 1/n_all of the sum of samples times
    their variables, over all workers. Steps see v plus `sigma` times what they add to it.
    """

    dual: torch.Tensor
    v: torch.Tensor
    n: int
    n_all: float
    sigma: float
    seed: Sequence[int]


class Sum(Protocol):
    """A worker's samples of a finite sum, P(w) = 1/n sum_i loss_i(w) + R(w), w in float64 [D].

    R may be infinite outside of a set, such as that of matrices with orthonormal columns.
    """

    @property
    def n_own(self) -> int:
        """Samples of this worker."""

    @property
    def l2(self) -> float:
        """R's weight of |w|^2 / 2."""

    @property
    def shrinks(self) -> bool:
        """Whether slopes may be no dual point, but mixtures of them can be."""

    @property
    def number(self) -> int:
        """The same for the same samples, loss and penalty, and hardly for others."""

    def mixtures(self, w: torch.Tensor, z: torch.Tensor, earlier: torch.Tensor) -> torch.Tensor:
        """Dual points: weights [M, 1 + K] of slopes at w and at K earlier models.

        z [D] and `earlier` [K, D] are the mean loss's gradients there.
        """

    def batches(self, n_samples: int) -> float:
        """How many of the worker's batches so many samples are."""

    def at(self, w: torch.Tensor) -> Here:
        """Gradient, slopes and loss there."""

    def loss(self, w: torch.Tensor) -> float:
        """The summed loss there."""

    def conjugates(self, slopes: torch.Tensor, c: float) -> float:
        """The sum of the loss's conjugates at c times the slopes."""

    def shrink(self, z: torch.Tensor) -> float:
        """The largest c <= 1 for which R's conjugate is finite at c z."""

    def prox(self, w: torch.Tensor, eta: float) -> torch.Tensor:
        """argmin_u R(u) + |u - w|^2 / (2 eta)."""

    def nearest(self, w: torch.Tensor) -> torch.Tensor:
        """The nearest to w of what R allows: what becomes of a mean of models."""

    def certificate(
        self, w: torch.Tensor, z: torch.Tensor, mean_loss: float, conjugates: float
    ) -> Certificate:
        """From the whole sum's gradient, mean loss, and mean conjugate at `shrink` of slopes."""

    def steps(self, asked: Steps) -> torch.Tensor:
        """Where the steps lead."""

    def penalty(self, w: torch.Tensor) -> float:
        """R(w), where R is finite."""

    def few(self, n: int, *, heavier: float = 1.0) -> Sum:
        """Up to so many of the samples, for trying out: alike, or those with least stable steps.

        With `heavier` times the penalty.
        """

    def smoothness(self, w: torch.Tensor) -> float:
        """The largest curvature of a sample's loss, near w; 0 without samples."""


class Task(Sum, Protocol):
    """A worker's samples of the sum of a linear model, whose losses are of predictions x_i w."""

    def few(self, n: int, *, heavier: float = 1.0) -> Task:
        """See `Sum.few`."""

    def curvature(self) -> float:
        """The largest curvature of a sample's loss, over all weights."""

    def bounds(self, start: int, stop: int) -> torch.Tensor:
        """A diagonal that the summed loss's Hessian of these features is below, at any model."""

    @property
    def l1(self) -> float:
        """R's weight of |w|_1."""

    def penalty_conjugate(self, g: torch.Tensor) -> float:
        """R*(g), where `shrink` leaves g as it is."""

    def dual_steps(self, asked: DualSteps) -> tuple[torch.Tensor, torch.Tensor]:
        """Dual variables after the steps, and what they add to v."""

    def margins(self, w: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Each sample's prediction, and the summed loss there."""

    def partial(self, margins: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """The summed loss's derivatives by these features, at predictions."""

    def shifted(
        self, margins: torch.Tensor, features: torch.Tensor, change: torch.Tensor
    ) -> tuple[torch.Tensor, float]:
        """Predictions after these features' weights changed so, and the change of the loss."""

    def n_touched(self, features: torch.Tensor) -> int:
        """Samples that have as many numbers as these features have."""

    def curvatures(self, block: torch.Tensor) -> torch.Tensor:
        """For each feature: a bound of the summed loss's curvature by those of its block."""

    def meetings(self, block: torch.Tensor, n_blocks: int) -> torch.Tensor:
        """Which two blocks have numbers in one sample: bits, in bytes."""
