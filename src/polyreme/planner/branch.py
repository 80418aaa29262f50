"""Memory that is no sum over layers: the largest of what single layers take for a moment.

An instance adds up bytes of layers. Beside them a stage needs what its largest layer takes while
its gradients are reduced, what its largest takes that is fetched from its host's memory, and twice
what its largest takes while it is gathered. A plan that lacks
this room shows how large these are in it: either some layer of the stage takes as much, and then
so much less is left for all, or none does. Both together are all there are: bounds stay bounds.

Source: branch and bound (Land and Doig 1960).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .cost.memory import SLACK_SHARE
from .solve.instance import Array, Assignment, Instance


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Bytes (L, K) that a layer takes for a moment, by strategy: reduced, gathered, fetched."""

    reducing: Array
    passing: Array
    fetched: Array


@dataclass(frozen=True, kw_only=True)
class Node:
    """An instance, and what of its stages' memory (S) is set aside for moments already."""

    instance: Instance
    reducing: Array
    passing: Array
    fetched: Array

    @classmethod
    def of(cls, instance: Instance, moments: Moments, shared: int) -> Node:
        """With room for the least that each stage needs while gradients are reduced.

        The first and the last layer lie on the first and the last stage, of all others one of
        those that can lie there; ranks hold `shared` stages each.
        """
        n, least = instance.n_stages, moments.reducing.min(axis=1)
        some = [least[stage : len(least) - n + stage + 1].min() for stage in range(n)]
        some[0], some[-1] = max(some[0], least[0]), max(some[-1], least[-1])
        aside = (1 + SLACK_SHARE) * np.array(some if n > 1 else [least.max()])
        capacity = np.maximum(instance.capacity - aside / shared, 1.0)
        instance = replace(instance, capacity=capacity)
        none = np.zeros(n)
        return cls(instance=instance, reducing=aside, passing=none, fetched=none)


def branch(node: Node, moments: Moments, solved: Assignment, stage: int) -> tuple[Node, ...]:
    """The node with room for the largest moment of a stage as it was solved, and without any such.

    None where all that can be told of its moments is set aside already.
    """
    instance = node.instance
    held = [layer for layer, at in enumerate(solved.stages) if at == stage]
    chosen = [solved.strategies[layer] for layer in held]
    best: tuple[float, str, float] = (1.0, "", 0.0)  # a byte is nothing
    for name, twice in (("reducing", 1.0), ("passing", 2.0), ("fetched", 1.0)):
        amount = float(getattr(moments, name)[held, chosen].max())
        lacking = (1 + SLACK_SHARE) * twice * amount - getattr(node, name)[stage]
        best = max(best, (lacking, name, amount))
    lacking, name, amount = best
    if not name:
        return ()
    capacity, aside = instance.capacity.copy(), getattr(node, name).copy()
    capacity[stage] = max(1.0, capacity[stage] - lacking)
    aside[stage] += lacking
    time = instance.time.copy()
    time[stage][getattr(moments, name) >= amount] = np.inf
    roomy = replace(node, instance=replace(instance, capacity=capacity), **{name: aside})
    return roomy, replace(node, instance=replace(instance, time=time))


def lone_s(instance: Instance) -> float:
    """What no step takes less than if a stage has two layers at most.

    Twice what is gathered is sure to be needed where a stage has more.
    """
    each: Array = instance.time.min(axis=2).min(axis=0)
    most = float(np.sort(each)[-2:].sum())
    if instance.n_stages == 1:
        return float("inf") if instance.n_layers > 2 else 0.0
    left = (float(each.sum()) - most) / (instance.n_stages - 1)
    return float(instance.alpha * each.sum() + instance.beta * left)
