"""One strategy for all layers, on stages as equal in time as can be: what people do by hand."""

from __future__ import annotations

import itertools
import time

import numpy as np

from ..stages import balanced, cut, spans
from .instance import Assignment, Instance


def grid(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """One strategy for all layers, each in turn, on balanced stages: what people do by hand.

    A layer to which the strategy is not offered runs as is fastest for it. It is given if it takes
    less than `below`; nothing is proved.

    Source: exhaustive search.
    """
    best, end_s = Assignment(), time.monotonic() + deadline_s
    if instance.is_hopeless:
        return best
    layers = np.arange(instance.n_layers)
    times = instance.time.min(axis=0)
    placed = np.isfinite(instance.time).any(axis=2)
    fastest = times.argmin(axis=1)
    for strategy in range(instance.n_strategies):
        if not np.isfinite(times[:, strategy]).any() or time.monotonic() > end_s:
            continue
        chosen = np.where(np.isfinite(times[:, strategy]), strategy, fastest)
        seconds = times[layers, chosen]
        if placed.all():
            sizes = balanced(tuple(seconds), instance.n_stages)
            ends: tuple[int, ...] | None = (0, *itertools.accumulate(sizes))
        else:  # the user fixed stages
            ends = cut(spans(np.where(placed, seconds, np.inf)))
        if ends is not None:
            found = instance.assignment(ends, chosen, min(below, best.objective_s))
            best = found if found.stages else best
    return best
