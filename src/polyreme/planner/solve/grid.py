"""Every draft of the space in turn: what people do by hand, and the oracle of other solvers."""

from __future__ import annotations

import time

from ...graph.layer import LayerGraph
from ..space import Space
from . import Candidate, Cost, Fit, Solution


def grid(graph: LayerGraph, space: Space, cost: Cost, memory: Fit, deadline_s: float) -> Solution:
    """Price every draft; of equal times the first, which is the simplest, wins.

    Source: exhaustive search. Past the deadline the rest of the space stays unseen and nothing is
    proved.
    """
    assert space.layers == tuple(layer.name for layer in graph.layers)
    end_s = time.monotonic() + deadline_s
    candidates: list[Candidate] = []
    complete = True
    for draft in space.drafts():
        if candidates and time.monotonic() > end_s:
            complete = False
            break
        candidates.append(Candidate(draft=draft, time=cost(draft), room=memory(draft)))
    candidates.sort(key=_rank)
    best = candidates[0]
    proved = complete and best.room.fits
    return Solution(
        candidates=tuple(candidates),
        objective_s=best.time.step_s,
        bound_s=min(kept.time.step_s for kept in candidates if kept.room.fits) if proved else 0.0,
        proved=proved,
    )


def _rank(candidate: Candidate) -> tuple[bool, float]:
    """Fitting ones by time (equal to 12 digits is equal), the others by what is missing."""
    if candidate.room.fits:
        return False, float(f"{candidate.time.step_s:.12g}")
    return True, candidate.room.over_bytes
