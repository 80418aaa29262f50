"""Alpa: the fastest way of each segment on each stage, and cuts under each longest stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np

from ..stages import cheapest, cut
from .chain import onward
from .instance import Array, Assignment, Instance

GAP = 1e-6  # relative: longest stages that differ by less are one


def alpa(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """Alpa: of each segment and stage the fastest strategies, then cuts for each longest stage.

    Inside a stage time alone is minimised, what goes from layer to layer included; memory only
    decides whether the result fits. As in the paper, other options are tried too, each of which
    leaves less to choose from, and of the results that fit the fastest is the segment's: here an
    option is one strategy for all layers that have it. Between stages each longest stage is tried,
    from the shortest on, while it may still lead to a faster step.

    Source: Zheng et al., "Alpa", OSDI 2022, section 5.2, equations 2 to 4.

    Differs: on a chain the integer programme inside a stage is a shortest path, and is solved as
    one. Devices of a stage are the instance's. Borders of stages, which the paper takes to be
    cheap, and tensors that pass layers by count in the objective alone.
    """
    end_s = time.monotonic() + deadline_s
    if instance.is_hopeless:
        return Assignment()
    options = list(_options(instance))
    seconds = np.full((instance.n_stages, instance.n_layers, instance.n_layers + 1), np.inf)
    chosen = np.zeros(seconds.shape, dtype=np.int64)
    for at, option in enumerate(options):
        found = _fastest(instance, option)
        chosen[found < seconds] = at
        seconds = np.minimum(seconds, found)
        if time.monotonic() > end_s:
            break
    ends = _cut(instance, seconds, end_s)
    if ends is None:
        return Assignment()
    strategies: list[int] = []
    for stage, (start, end) in enumerate(itertools.pairwise(ends)):
        option = options[chosen[stage, start, end]]
        strategies += _path(option[stage, start:end], instance.inside[start : end - 1])
    return instance.assignment(ends, strategies, below)


def _options(instance: Instance) -> Iterator[Array]:
    """Times (S, L, K) of what is offered: all of it, then of one strategy where a layer has it."""
    yield instance.time
    for strategy in range(instance.n_strategies):
        others = np.arange(instance.n_strategies) != strategy
        left = np.isfinite(instance.time[:, :, strategy])[:, :, None] & others
        yield np.where(left, np.inf, instance.time)


def _fastest(instance: Instance, option: Array) -> Array:
    """Least seconds by stage, start and end (S, L, L + 1); infinite where these do not fit."""
    n_stages, n_layers, n_strategies = option.shape
    found = np.full((n_stages, n_layers, n_layers + 1), np.inf)
    took = np.full((n_stages, n_layers, n_strategies), np.inf)  # by start and last strategy
    held = np.zeros_like(took)
    for layer in range(n_layers):
        if layer:
            moved, before = onward(took[:, :layer], instance.inside[layer - 1])
            took[:, :layer] = moved + option[:, None, layer]
            held[:, :layer] = np.take_along_axis(held[:, :layer], before, axis=2)
            held[:, :layer] += instance.memory[:, None, layer]
        took[:, layer], held[:, layer] = option[:, layer], instance.memory[:, layer]
        last = took[:, : layer + 1].argmin(axis=2)[:, :, None]
        bytes_held = np.take_along_axis(held[:, : layer + 1], last, axis=2)[:, :, 0]
        fits = bytes_held <= instance.capacity[:, None]
        found[:, : layer + 1, layer + 1] = np.where(fits, took[:, : layer + 1].min(axis=2), np.inf)
    return found


def _cut(instance: Instance, seconds: Array, end_s: float) -> tuple[int, ...] | None:
    """The ends that take least by sum and longest stage, over all longest stages."""
    alpha, beta = instance.alpha, instance.beta
    free = np.zeros(instance.n_layers - 1)
    best, least = cut(seconds), cheapest(seconds, free, np.inf)
    if best is None or least is None:
        return None
    shortest = max(
        seconds[i, start, end] for i, (start, end) in enumerate(itertools.pairwise(best))
    )
    limits = np.unique(seconds[np.isfinite(seconds) & (seconds >= shortest)])
    limits = limits[np.append(limits[1:] > limits[:-1] * (1 + GAP), True)]
    best_s = np.inf
    for limit in limits:
        if alpha * least[0] + beta * limit >= best_s or time.monotonic() > end_s:
            break
        found = cheapest(seconds, free, limit)
        if found is not None and alpha * found[0] + beta * found[2] < best_s:
            best_s, best = alpha * found[0] + beta * found[2], found[1]
    return best


def _path(seconds: Array, inside: Array) -> list[int]:
    """The fastest strategies of layers in a row, of seconds (n, K) and those between (n - 1)."""
    took, before = seconds[0], []
    for own, pairs in zip(seconds[1:], inside, strict=True):
        moved, came = onward(took, pairs)
        before.append(came)
        took = moved + own
    found = [int(took.argmin())]
    for each in reversed(before):
        found.append(int(each[found[-1]]))
    return found[::-1]
