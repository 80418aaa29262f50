"""How large steps may be: the smoothness of rows."""

from __future__ import annotations

from . import kernels
from .loss import sharpest
from .shard import Shard


def smoothness(shard: Shard) -> float:
    """The largest curvature of a row's loss: that of the loss times its squared norm."""
    code, gamma, indptr, _, values, _ = shard.given
    return float(sharpest(code, gamma) * kernels.longest_row(indptr, values))
