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
    order = f" ({plan.order_name})" if plan.order_name else ""
    stages = f"{len(plan.stages)} stages{order}, " if several else ""
    passes = "microbatch" if plan.microbatches == 1 else "microbatches"
    return f"{stages}{how}, {plan.microbatches} {passes}"


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
