"""A step of shortest paths through strategies of layers that follow each other."""

from __future__ import annotations

import numpy as np

from .instance import Array, Integers


def onward(took: Array, moved: Array) -> tuple[Array, Integers]:
    """Least seconds up to the next layer, and the strategy before it, by its own strategy.

    `took` (..., K) is by the last layer's strategy, `moved` (K, K) what goes from there.
    """
    if (moved == moved[:1]).all():  # whatever comes from: K times as fast
        before = np.broadcast_to(took.argmin(axis=-1)[..., None], took.shape)
        return took.min(axis=-1)[..., None] + moved[0], before
    both = took[..., :, None] + moved
    return both.min(axis=-2), both.argmin(axis=-2)
