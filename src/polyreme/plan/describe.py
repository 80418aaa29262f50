"""A plan in one line."""

from __future__ import annotations

from collections import Counter

from .ir import LayerPlan, Plan, axes, degree, devices

_PLURAL = {"replica": "replicas", "shard": "shards"}


def describe(plan: Plan) -> str:
    """The plan in one line: ``2 replicas x 4 shards (params), recompute, 2 microbatches``."""
    several = len(plan.stages) > 1
    known = {id(each): _describe_layer(each, several) for each in plan.layer_plans.values()}
    counts = Counter(known[id(each)] for each in plan.layer_plans.values())
    if len(counts) == 1:
        how = next(iter(counts))
    else:
        how = "; ".join(f"{count} layers: {text}" for text, count in counts.most_common())
    passes = _count(plan.microbatches, "microbatch", "es")
    n_ranks = len({each for stage in plan.stages for each in stage.placements})
    stages = describe_stages(len(plan.stages), n_ranks, plan.order_name, len(plan.token_slices))
    return f"{stages + ', ' if several else ''}{how}, {passes}"


def describe_stages(n_stages: int, n_ranks: int, order: str, n_slices: int = 0) -> str:
    """Stages, the ranks if they are fewer, the order's name, and slices of tokens if it has any.

    >>> describe_stages(4, 2, "zb-v")
    '4 stages on 2 ranks (zb-v)'
    >>> describe_stages(2, 2, "terapipe", 1)
    '2 stages (terapipe), 1 slice of tokens'
    """
    ranks = f" on {n_ranks} ranks" if n_ranks != n_stages else ""
    name = f" ({order})" if order else ""
    slices = f", {_count(n_slices, 'slice')} of tokens" if n_slices else ""
    return f"{n_stages} stages{ranks}{name}{slices}"


def _count(n: int, what: str, plural: str = "s") -> str:
    return f"{n} {what}" + (plural if n != 1 else "")


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
