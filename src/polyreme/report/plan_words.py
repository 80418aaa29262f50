"""What the words of a plan's line mean, for that plan."""

from __future__ import annotations

from ..plan.describe import degrees_of, describe_offload
from ..plan.grid import even_degrees
from ..plan.ir import LayerPlan, Plan
from ..units import count
from .drawing import LEVELS
from .words import runs_of

_AXES = {
    "replica": ("replicas", "complete copies of the model, each on its own share of the batch"),
    "shard": ("shards", "devices that share one copy of the model and its batch"),
    "cp": ("cp", "contexts: devices that share the tokens of each sample, in attention too"),
    "tp": ("tp", "tensor parts: devices that compute each layer together"),
}
_MOST_NAMED = 8  # stages whose layers are named
_AT_ONCE = "a device takes its samples of a step at once"
_IN_GOES = "a device takes its samples of a step in so many goes, and updates after the last"


def glossary(plan: Plan) -> list[tuple[str, str]]:
    """(word, meaning) of each that the plan's line holds, in its order."""
    layer_plans = list({id(each): each for each in plan.layer_plans.values()}.values())
    splits = [each.split for each in layer_plans]
    found = _stages(plan) if len(plan.stages) > 1 else []
    degrees = dict.fromkeys(each for split in splits for each in degrees_of(split))
    for axis, n in degrees:
        name, meaning = _AXES.get(axis, (axis, "parts of each layer"))
        found.append((f"{n} {name}", meaning))
    even = [each for split in splits if (each := even_degrees(split)) is not None]
    for ep in dict.fromkeys(each.ep for each in even if each.ep > 1):
        found.append((f"{ep} ep", "experts of a layer are dealt out to so many of these devices"))
    n_shards = max(dict(degrees_of(split)).get("shard", 1) for split in splits)
    found += _ways(layer_plans, n_shards=n_shards)
    goes = count(plan.microbatches, "microbatch", "microbatches")
    return [*found, (goes, _AT_ONCE if plan.microbatches == 1 else _IN_GOES)]


def _stages(plan: Plan) -> list[tuple[str, str]]:
    n, order = len(plan.stages), plan.order_name or "a given order"
    n_ranks = len({row for stage in plan.stages for row in stage.placements})
    meaning = (
        f"the layers are cut into {n} parts one behind the other, on {n_ranks} pipeline ranks of "
        f"devices; {order} is the order of their passes"
    )
    if n <= _MOST_NAMED:
        meaning += ". From the first: " + "; ".join(runs_of(each.layers) for each in plan.stages)
    return [(f"{n} stages", meaning)]


def _ways(layer_plans: list[LayerPlan], *, n_shards: int) -> list[tuple[str, str]]:
    """How layers run beside being split."""
    levels = dict.fromkeys(each.level for each in layer_plans) if n_shards > 1 else {}
    found = [(f"({'batch' if each == 'none' else each})", LEVELS[each]) for each in levels]
    if any(each.sp for each in layer_plans):
        found.append(("sp", "tensor parts also split the tokens of a sample between layers"))
    if any(each.recompute for each in layer_plans):
        meaning = "what a layer saves is made again in its backward pass, which takes less memory"
        found.append(("recompute", meaning))
    for causes in dict.fromkeys(each.offload for each in layer_plans if each.offload):
        meaning = "optimizer states lie in the host's memory, and come to the device to be updated"
        if "parameters" in causes:
            meaning = (
                "parameters, gradients and optimizer states of a layer lie in the host's memory, "
                "and come to the device when the layer runs, and to be updated"
            )
        found.append((describe_offload(causes), meaning))
    return found
