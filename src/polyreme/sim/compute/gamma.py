"""Machines that differ, and tasks that differ on each."""

from __future__ import annotations

from .draws import uniform
from .kind import ComputeKind, Positive


class Gamma(ComputeKind, frozen=True, kw_only=True, tag="gamma", tag_field="kind"):
    """Each worker has a mean time, drawn once; gradients are drawn around it; both gamma.

    Source: Ali et al. 2000, "Representing Task and Machine Heterogeneities for Heterogeneous
    Computing System Simulations" (coefficient-of-variation-based method).
    Differs: a worker's mean is drawn first and gradients around it, as all gradients are alike.

    Attributes:
        seconds: Of one gradient, in the mean over workers.
        machine_spread: Standard deviation of workers' means over `seconds`.
        spread: Standard deviation of a worker's gradients over their mean.
    """

    seconds: Positive = 1.0
    machine_spread: Positive = 0.1
    spread: Positive = 0.1

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Drawn around the worker's mean."""
        mean_s = self.seconds * _drawn(self.machine_spread, uniform(seed, rank))
        return mean_s * _drawn(self.spread, uniform(seed, rank, batch))


def _drawn(spread: float, quantile: float) -> float:
    """The quantile of the gamma distribution of mean 1 and that deviation."""
    from scipy.special import gammaincinv

    shape = spread**-2
    return float(gammaincinv(shape, quantile)) / shape
