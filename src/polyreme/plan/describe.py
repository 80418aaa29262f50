"""A plan in one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..units import count
from .ir import LayerPlan, Plan, axes, degree, devices

_MOST_NAMED = 8  # stages
_PLURAL = {"replica": "replicas", "shard": "shards"}


def describe(plan: Plan) -> str:
    """The plan in one line: ``2 replicas x 4 shards (params), recompute, 2 microbatches``."""
    several = len(plan.stages) > 1
    known = {id(each): _describe_layer(each, several) for each in plan.layer_plans.values()}
    counts = Counter(known[id(each)] for each in plan.layer_plans.values())
    if len(counts) == 1:
        how = next(iter(counts))
    else:
        how = "; ".join(f"{count(n, 'layer')}: {text}" for text, n in counts.most_common())
    passes = count(plan.microbatches, "microbatch", "microbatches")
    n_ranks = len({each for stage in plan.stages for each in stage.placements})
    sizes = [len(stage.layers) for stage in plan.stages]
    stages = describe_stages(sizes, n_ranks, plan.order_name, len(plan.token_slices))
    return f"{stages + ', ' if several else ''}{how}, {passes}"


def describe_stages(sizes: Sequence[int], n_ranks: int, order: str, n_slices: int = 0) -> str:
    """Stages, the ranks if they are fewer, the order's name, and slices of tokens if it has any.

    `sizes` are the layers of each stage; they are named where a few are unequal by more than one.

    >>> describe_stages((3, 3, 3, 2), 2, "zb-v")
    '4 stages on 2 ranks (zb-v)'
    >>> describe_stages((1, 5), 2, "1f1b")
    '2 stages of 1 + 5 layers (1f1b)'
    >>> describe_stages((3, 3), 2, "terapipe", 1)
    '2 stages (terapipe), 1 slice of tokens'
    """
    n_stages = len(sizes)
    ranks = f" on {n_ranks} ranks" if n_ranks != n_stages else ""
    if n_stages <= _MOST_NAMED and max(sizes) - min(sizes) > 1:
        ranks += f" of {' + '.join(map(str, sizes))} layers"
    name = f" ({order})" if order else ""
    slices = f", {count(n_slices, 'slice')} of tokens" if n_slices else ""
    return f"{n_stages} stages{ranks}{name}{slices}"


def _describe_layer(layer_plan: LayerPlan, several: bool) -> str:
    split = layer_plan.split
    parts = []
    for axis in axes(split):
        name = _PLURAL.get(axis, axis)
        parts.append(f"{degree(split, axis)} {name}")
    if not parts:
        parts = ["1 device each" if several else f"device {devices(split)[0]}"]
    text = " x ".join(parts)
    if degree(split, "shard") > 1:
        text += f" ({'batch' if layer_plan.level == 'none' else layer_plan.level})"
    for name in ("sp", "recompute"):
        if getattr(layer_plan, name):
            text += f", {name}"
    for what in sorted(layer_plan.offload):
        text += f", {what} offloaded"
    return text
