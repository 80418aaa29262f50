"""PipeDream: the cut whose slowest stage or border is the fastest."""

from __future__ import annotations

import time

import numpy as np

from ..stages import cut, spans
from .instance import Assignment, Instance


def pipedream(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """PipeDream: the stages of which the slowest, borders among them, takes least.

    Each layer runs by its fastest strategy. Memory is not in the paper's programme: a result that
    does not fit is not given.

    Source: Narayanan et al., "PipeDream", SOSP 2019, section 3.1.

    Differs: how many devices a stage has is the instance's, so stages are not replicated here. What
    goes from layer to layer inside a stage counts as its time; tensors that pass layers by count in
    the objective alone. The sum of all stages is not looked at, as in the paper.
    """
    end_s = time.monotonic() + deadline_s
    if instance.is_hopeless:
        return Assignment()
    n_stages, n = instance.n_stages, instance.n_layers
    fastest = instance.time.argmin(axis=2)  # by stage and layer
    own = instance.time.min(axis=2)
    layers = np.arange(n - 1)
    moved = instance.inside[layers, fastest[:, :-1], fastest[:, 1:]]
    costs = spans(own, moved)
    over = instance.between[layers, fastest[:-1, :-1], fastest[1:, 1:]]  # into stages after one
    costs[1:, 1:] = np.maximum(costs[1:, 1:], over[:, :, None])
    ends = cut(costs)
    if ends is None or time.monotonic() > end_s:
        return Assignment()
    of_layer = np.repeat(np.arange(n_stages), np.diff(ends))
    return instance.assignment(ends, fastest[of_layer, np.arange(n)], below)
