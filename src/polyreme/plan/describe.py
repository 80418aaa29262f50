"""A plan in one line."""

from __future__ import annotations

from collections import Counter

from .ir import LayerPlan, Plan, axes, degree, devices

_PLURAL = {"replica": "replicas", "shard": "shards"}


def describe(plan: Plan) -> str:
    """The plan in one line: ``2 replicas x 4 shards (params), recompute, 2 microbatches``."""
    counts = Counter(plan.layer_plans.values())
    if len(counts) == 1:
        how = _describe_layer(next(iter(counts)))
    else:
        how = "; ".join(
            f"{count} layers: {_describe_layer(layer_plan)}"
            for layer_plan, count in counts.most_common()
        )
    stages = f"{len(plan.stages)} stages, " if len(plan.stages) > 1 else ""
    passes = "microbatch" if plan.microbatches == 1 else "microbatches"
    return f"{stages}{how}, {plan.microbatches} {passes}"


def _describe_layer(layer_plan: LayerPlan) -> str:
    split = layer_plan.split
    parts = []
    for axis in axes(split):
        name = _PLURAL.get(axis, axis)
        parts.append(f"{degree(split, axis)} {name}")
    if not parts:
        parts = [f"device {devices(split)[0]}"]
    text = " x ".join(parts)
    if degree(split, "shard") > 1:
        text += f" ({'batch' if layer_plan.level == 'none' else layer_plan.level})"
    for name in ("sp", "recompute"):
        if getattr(layer_plan, name):
            text += f", {name}"
    for what in sorted(layer_plan.offload):
        text += f", {what} offloaded"
    return text
