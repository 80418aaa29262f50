"""Galvatron-BMW: Galvatron's stages with borders that move away from the slowest one."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from ..stages import cut, spans
from .galvatron import least
from .instance import Assignment, Instance

Ends = tuple[int, ...]


def galvatron_bmw(
    instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0
) -> Assignment:
    """Galvatron-BMW: stages balanced by memory and by time, then borders moved layer by layer.

    Strategies of a stage are those of `galvatron`. From the cut whose fullest stage has the most
    room, and from that whose longest stage is the shortest, the slowest stage gives a layer to one
    beside it while that shortens the step and fits.

    Source: Wang et al., "Improving Automatic Parallel Training via Balanced Memory Workload
    Optimization", 2023, section on bi-objective optimization.

    Differs: balance is judged by the least bytes and the least seconds that each layer can have,
    because strategies are not chosen yet; both balanced cuts are starts, of which the paper takes
    the second as a bound. Of two moves the better one is made.
    """
    end_s = time.monotonic() + deadline_s
    if instance.is_hopeless:
        return Assignment()
    stage_of = functools.cache(functools.partial(least, instance))

    def priced(ends: Ends) -> Assignment:
        found = [stage_of(stage, *pair) for stage, pair in enumerate(itertools.pairwise(ends))]
        if not all(found):
            return Assignment()
        return instance.assignment(ends, list(itertools.chain.from_iterable(found)), np.inf)

    full = instance.bytes_offered.min(axis=2) / instance.capacity[:, None]
    best = Assignment()
    for each in (full, instance.time.min(axis=2)):
        ends = cut(spans(each))
        if ends is not None:
            best = min(best, _improved(instance, ends, priced, end_s), key=_objective_s)
    return best if best.objective_s < below else Assignment()


def _improved(
    instance: Instance, ends: Ends, priced: Callable[[Ends], Assignment], end_s: float
) -> Assignment:
    """What a cut comes to when layers move from the slowest stage for as long as that helps."""
    now = priced(ends)
    while now.stages and time.monotonic() < end_s:
        slowest = int(instance.stage_times(now.stages, now.strategies)[0].argmax())
        moves = [(priced(moved), moved) for moved in _moved(ends, slowest)]
        better, ends = min(moves, key=lambda move: move[0].objective_s, default=(now, ends))
        if better.objective_s >= now.objective_s:
            break
        now = better
    return now


def _objective_s(assignment: Assignment) -> float:
    return assignment.objective_s


def _moved(ends: Ends, stage: int) -> Iterator[Ends]:
    """The cut with a layer less on a stage, the one before or after it having it."""
    if ends[stage + 1] - ends[stage] < 2:
        return
    if stage > 0:
        yield (*ends[:stage], ends[stage] + 1, *ends[stage + 1 :])
    if stage < len(ends) - 2:
        yield (*ends[: stage + 1], ends[stage + 1] - 1, *ends[stage + 2 :])
