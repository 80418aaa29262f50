"""Piper: cuts by the heaviest stage; inside one, layers give up time for memory greedily."""

from __future__ import annotations

import itertools
import time

import numpy as np

from ..stages import cut
from .instance import Array, Assignment, Instance, Integers


def piper(instance: Instance, *, below: float = np.inf, deadline_s: float = 60.0) -> Assignment:
    """Piper: the cut whose heaviest stage is the lightest, strategies by bang per buck.

    In a stage each layer begins with its fastest strategy; while they do not fit, the change that
    costs the fewest seconds for each byte that is still needed is made. A stage's load is
    its time and that of both borders. The programme looks at the heaviest stage, not at the sum.

    Source: Tarnawski et al., "Piper", NeurIPS 2021, section 4.

    Differs: degrees of data and tensor parallelism, and devices of a stage, are the instance's. The
    greedy choice does not see what goes from layer to layer; a stage's load does. Of a border the
    least seconds of any two strategies count. Tensors that pass layers by count in the objective
    alone.
    """
    end_s = time.monotonic() + deadline_s
    if instance.is_hopeless:
        return Assignment()
    n_stages, n = instance.n_stages, instance.n_layers
    loads = np.full((n_stages, n, n + 1), np.inf)
    over = np.concatenate([[0.0], _borders(instance), [0.0]])  # by the layer that begins behind
    stages = [_Stage(instance, stage) for stage in range(n_stages)]
    for stage, start in itertools.product(range(n_stages), range(n)):
        if start < stage or (stage == 0 and start > 0):
            continue
        for end in range(start + 1, n + 1):
            found = stages[stage].chosen(start, end)
            if found is None:  # nor does a longer one fit
                break
            own = stages[stage].seconds(start, found)
            loads[stage, start, end] = own + over[start] + over[end]
        if time.monotonic() > end_s:
            return Assignment()
    ends = cut(loads)
    if ends is None:
        return Assignment()
    each = [stages[stage].chosen(*pair) for stage, pair in enumerate(itertools.pairwise(ends))]
    return instance.assignment(ends, np.concatenate([ks for ks in each if ks is not None]), below)


def _borders(instance: Instance) -> Array:
    """The least seconds of each border, of strategies that are offered."""
    offered = np.isfinite(instance.time.min(axis=0))
    both = offered[:-1, :, None] & offered[1:, None, :]
    found: Array = np.where(both, instance.between, np.inf).min(axis=(1, 2))
    return found


class _Stage:
    """Strategies of any layers on one stage.

    `steps` are changes of a layer's strategy by what a byte costs: a layer's come in the order in
    which they are made.
    """

    def __init__(self, instance: Instance, stage: int) -> None:
        self._time, self._memory = instance.time[stage], instance.memory[stage]
        self._inside, self._capacity = instance.inside, float(instance.capacity[stage])
        self._held = instance.bytes_offered[stage]
        self._fastest = np.lexsort((self._memory, self._time), axis=1)[:, 0]
        steps = [step for layer in range(instance.n_layers) for step in self._steps(layer)]
        steps.sort(key=lambda step: step[0])
        self._layer = np.array([layer for _, layer, _, _ in steps], dtype=np.int64)
        self._to = np.array([to for _, _, to, _ in steps], dtype=np.int64)
        self._saved = np.array([saved for *_, saved in steps])

    def chosen(self, start: int, end: int) -> Integers | None:
        """Strategies of layers from `start` up to `end`; none: nothing fits."""
        rows = np.arange(end - start)
        held, seconds = self._held[start:end], self._time[start:end]
        found = self._fastest[start:end].copy()
        lowest = held.min(axis=1)
        if not lowest.sum() <= self._capacity:
            return None
        missing = held[rows, found].sum() - self._capacity
        if missing > 0:
            # As long as more is missing than any change saves, none saves in vain.
            here = np.flatnonzero((self._layer >= start) & (self._layer < end))
            left = missing - np.cumsum(self._saved[here]) + self._saved[here]  # before each
            whole = here[left >= (held[rows, found] - lowest).max()]
            found[self._layer[whole] - start] = self._to[whole]
        while (missing := held[rows, found].sum() - self._capacity) > 0:
            saved = held[rows, found][:, None] - held
            more = seconds - seconds[rows, found][:, None]
            price = np.where(saved > 0, more, np.inf) / np.clip(saved, 1e-300, missing)
            layer, to = divmod(int(price.argmin()), held.shape[1])
            found[layer] = to
        return found

    def seconds(self, start: int, strategies: Integers) -> float:
        """What layers from `start` on take, with what goes from one to the next."""
        layers = start + np.arange(len(strategies))
        moved = self._inside[layers[:-1], strategies[:-1], strategies[1:]]
        return float(self._time[layers, strategies].sum() + moved.sum())

    def _steps(self, layer: int) -> list[tuple[float, int, int, float]]:
        """Seconds for each byte, the layer, its new strategy, and the bytes that it saves."""
        found, at, paid = [], int(self._fastest[layer]), 0.0
        while np.isfinite(self._time[layer, at]):
            saved = self._held[layer, at] - self._held[layer]
            more = self._time[layer] - self._time[layer, at]
            if not (saved > 0).any():
                break
            price = np.where(saved > 0, more, np.inf) / np.maximum(saved, 1e-300)
            at = int(price.argmin())
            paid = max(paid, float(price[at]))  # rising but for rounding
            found.append((paid, layer, at, float(saved[at])))
        return found
