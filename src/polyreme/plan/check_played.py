"""What an order asks of a model: slices of tokens, weights in versions."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Violation
from ..graph.layer import LayerGraph
from .grid import grid_of
from .ir import Plan


def slice_violations(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Slices of tokens need layers that can work behind others, and whose passes are kept."""
    n = 1 + max((each.token_slice for own in plan.order for each in own), default=0)
    if n == 1:
        if len(plan.token_slices) > 1:
            rule = "are lengths of slices, and the order plays whole samples"
            yield _wrong("token_slices", list(plan.token_slices), rule, "[]")
        return
    if not graph.sliced:
        rule = "needs slices of tokens, and the model's layers do not work on tokens behind others"
        yield _wrong("order", n, rule, "an order over whole samples, or a causal language model")
        return
    n_tokens = graph.inputs["input_ids"].shape[0]
    lengths = plan.token_slices
    if lengths and (len(lengths) != n or sum(lengths) != n_tokens or min(lengths) < 1):
        rule = f"does not make {n} slices of {n_tokens} tokens"
        yield _wrong("token_slices", list(lengths), rule, f"{n} integers >= 1 that add up to it")
    elif n > n_tokens:
        rule = f"cuts {n_tokens} tokens into {n} slices"
        yield _wrong("order", n, rule, f"at most {n_tokens} slices")
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.sp or layer_plan.recompute:
            field = "sp" if layer_plan.sp else "recompute"
            rule = "does not go with slices of tokens"
            yield _wrong(f"layer_plans.{name}.{field}", True, rule, "false")


def version_violations(plan: Plan, graph: LayerGraph) -> Iterator[Violation]:
    """Weights in versions are whole, and of one stage a device."""
    if not any(each.weight_version for own in plan.order for each in own):
        return
    grid = grid_of(plan)
    if plan.decouple:
        rule = "gathers after the step what is updated within it"
        yield _wrong("decouple", True, rule, "false")
    for name, layer_plan in plan.layer_plans.items():
        if layer_plan.level != "none":
            rule = "shards weights that are kept in versions"
            yield _wrong(f"layer_plans.{name}.level", layer_plan.level, rule, '"none"')
    if grid is not None and len(grid.holders) > grid.pp:
        rule = "puts several stages on a device, and weights are kept in versions"
        yield _wrong("stages", len(plan.stages), rule, f"{grid.pp}")
    stage_of = {name: at for at, stage in enumerate(plan.stages) for name in stage.layers}
    owner = {
        name: layer.name
        for layer in graph.layers
        for name in layer.params.values()
        if name not in layer.ties
    }
    for layer in graph.layers:
        for whole in layer.ties:
            if stage_of[owner[whole]] != stage_of[layer.name]:
                rule = f'shares "{whole}" with another stage, which updates it at other times'
                yield _wrong("stages", layer.name, rule, "tied layers in one stage, or no ties")


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)
