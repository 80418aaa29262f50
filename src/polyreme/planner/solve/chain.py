"""A step of shortest paths through strategies of layers that follow each other."""

from __future__ import annotations

import numpy as np

from .instance import Array, Integers

_FEW = 16  # strategies: to find which of them share a layout takes longer than to try all pairs


def onward(took: Array, moved: Array) -> tuple[Array, Integers]:
    """Least seconds up to the next layer, and the strategy before it, by its own strategy.

    `took` (..., K) is by the last layer's strategy, `moved` (K, K) what goes from there. Of many
    strategies those that tensors leave, or reach, alike (those of one layout) are looked at once:
    that is faster by the square of how many share one.
    """
    if (moved == moved[:1]).all():  # whatever comes from
        before = np.broadcast_to(took.argmin(axis=-1)[..., None], took.shape)
        return took.min(axis=-1)[..., None] + moved[0], before
    if len(moved) <= _FEW:
        every = took[..., :, None] + moved
        return every.min(axis=-2), every.argmin(axis=-2)
    rows, of = np.unique(moved, axis=0, return_inverse=True)
    pairs, to = np.unique(rows, axis=1, return_inverse=True)
    sharing = [np.flatnonzero(of == row) for row in range(len(rows))]
    fastest = np.stack([own[took[..., own].argmin(axis=-1)] for own in sharing], axis=-1)
    both = np.take_along_axis(took, fastest, axis=-1)[..., :, None] + pairs
    before = np.take_along_axis(fastest, both.argmin(axis=-2), axis=-1)
    return both.min(axis=-2)[..., to], before[..., to]
