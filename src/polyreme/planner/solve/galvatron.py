"""Galvatron: even stages, each by dynamic programming over its layers and its memory in units."""

from __future__ import annotations

import itertools
import time

import numpy as np

from ..stages import cut, spans
from .chain import onward
from .instance import Assignment, Instance

UNITS = 4096  # of a stage's memory: 20 MB of 80 GB


def galvatron(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """Galvatron: stages of as many layers each, their strategies by dynamic programming.

    A stage's programme finds the least sum of its layers' times and of what goes between them.
    Memory is counted in 4096ths of the stage's, each layer's rounded up: what fits the programme
    fits the stage, but the last of its memory may stay unused. Where layers do not divide, the
    first stages have one more; stages that the user fixed stay.

    Source: Miao et al., "Galvatron", VLDB 2023.

    Differs: strategies are the instance's, not the paper's decision trees of powers of two. Borders
    of stages and tensors that pass layers by count in the objective alone, not in the programme.
    """
    end_s = time.monotonic() + deadline_s
    if instance.is_hopeless:
        return Assignment()
    offered = np.isfinite(instance.time).any(axis=2)
    ends = cut(spans(np.where(offered, 1.0, np.inf)))
    if ends is None:
        return Assignment()
    strategies: list[int] = []
    for stage, (start, end) in enumerate(itertools.pairwise(ends)):
        found = least(instance, stage, start, end)
        if not found or time.monotonic() > end_s:
            return Assignment()
        strategies += found
    return instance.assignment(ends, strategies, below)


def least(instance: Instance, stage: int, start: int, end: int) -> list[int]:
    """Strategies of the least time for layers of a stage within its units; none: none fit."""
    seconds = instance.time[stage, start:end]
    share = instance.memory[stage, start:end] / instance.capacity[stage]
    units = np.minimum(np.ceil(share * UNITS), UNITS + 1).astype(np.int64)
    room = np.arange(UNITS + 1)[:, None]
    took = np.where(room >= units[0], seconds[0], np.inf)  # within so many units, by the last one's
    before = []
    for layer in range(1, end - start):
        moved, came = onward(took, instance.inside[start + layer - 1])
        before.append(came)
        took = np.full_like(moved, np.inf)
        for strategy, own in enumerate(units[layer]):
            shifted = moved[: max(0, UNITS + 1 - own), strategy]
            took[own:, strategy] = shifted + seconds[layer, strategy]
    strategy, left = int(took[-1].argmin()), UNITS
    if not np.isfinite(took[-1, strategy]):
        return []
    found = [strategy]
    for layer in range(end - start - 1, 0, -1):
        left -= units[layer, found[-1]]
        found.append(int(before[layer - 1][left, found[-1]]))
    return found[::-1]
