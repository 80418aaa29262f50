"""A bound of the optimum from below, that is kept while a solver goes on.

Source: Ndiaye et al. 2017, "Gap safe screening rules for sparsity enforcing penalties", section 2
(a dual point that is made smaller until it is inside of the penalty).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from . import passes
from .problem import Certificate
from .shard import Shard


@dataclass(frozen=True, kw_only=True)
class Below:
    """The best bound so far, and the slopes [N] that it is of; None before there are any."""

    bound: float = -math.inf
    slopes: np.ndarray | None = None

    def beside(self, shard: Shard, slopes: np.ndarray | None) -> Below:
        """The better of this, and of what slopes tell after they are moved to where any are."""
        if slopes is None:
            return self
        rows, n, penalty = shard.rows, len(shard), shard.objective.penalty
        allowed = _allowed(shard, slopes)
        given = rows.indptr, rows.indices, rows.values
        z = passes.spread(*given, allowed, rows.n_features) / n
        c = penalty.shrink(z)
        bound = -shard.conjugates(allowed, c) / n - penalty.conjugate(-c * z)
        return Below(bound=bound, slopes=allowed) if bound > self.bound else self

    def after(self, found: Certificate, slopes: np.ndarray) -> Below:
        """The better of this, and of the slopes that a certificate is of."""
        bound = found.objective - found.gap
        return Below(bound=bound, slopes=slopes) if bound > self.bound else self

    def of(self, found: Certificate) -> Certificate:
        """With the gap to this bound, if that is smaller."""
        return replace(found, gap=min(found.gap, found.objective - self.bound))


def _allowed(shard: Shard, slopes: np.ndarray) -> np.ndarray:
    """The nearest that the loss has."""
    objective = shard.objective
    if not objective.classifies:
        return slopes
    most = math.inf if objective.loss == "squared_hinge" else 1.0
    found: np.ndarray = -shard.y * np.clip(-shard.y * slopes, 0.0, most)
    return found
