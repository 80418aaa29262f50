"""Into how many tensor parts the layers of a model can be split."""

from __future__ import annotations

import msgspec

from ..graph.layer import LayerGraph


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a model cannot be split into so many tensor parts: the first layer that refuses."""

    layer: str
    rule: str
    legal: str


def legal_tp(graph: LayerGraph, layer: str, tp: int) -> bool:
    """Whether a layer can be split into so many tensor parts."""
    plan = graph.tensor_plan(layer)
    return tp == 1 or (plan is not None and plan.legal(tp))


def refused_tp(graph: LayerGraph, tp: int) -> Refusal | None:
    """Why the model cannot be split into so many tensor parts; None if it can."""
    for name in () if tp == 1 else _one_of_each_kind(graph):
        plan = graph.tensor_plan(name)
        if plan is None:
            rule = f'is more than 1, and layer "{name}" cannot be split'
            return Refusal(layer=name, rule=rule, legal="1")
        reason = plan.refusal(tp)
        if reason is not None:
            legal = ", ".join(map(str, legal_degrees(graph, tp)))
            return Refusal(layer=name, rule=f'{reason} of layer "{name}"', legal=legal)
    return None


def refused_cp(graph: LayerGraph, cp: int) -> Refusal | None:
    """Why the tokens of a sample cannot be split over so many devices; None if they can."""
    for name in () if cp == 1 else _one_of_each_kind(graph):
        known = graph.tensor_plan(name) is not None  # it says what attention reads
        most = graph.layer(name).splits.get("cp", 1) if known else 1
        if cp > most:
            rule = f'exceeds what layer "{name}" allows'
            return Refusal(layer=name, rule=rule, legal="1" if most == 1 else f"1 to {most}")
    return None


def refused_ep(graph: LayerGraph, ep: int) -> Refusal | None:
    """Why no layer's experts can be dealt out to so many devices; None if some layer's can."""
    plans = {name: graph.expert_plan(name) for name in _one_of_each_kind(graph)}
    routed = {name: plan for name, plan in plans.items() if plan is not None}
    if ep == 1 or any(plan.legal(ep) for plan in routed.values()):
        return None
    if not routed:
        first = graph.layers[0].name
        return Refusal(layer=first, rule="is more than 1, and no layer has experts", legal="1")
    name, plan = next(iter(routed.items()))
    legal = ", ".join(str(n) for n in range(1, plan.n_experts + 1) if plan.legal(n))
    rule = f'does not divide the {plan.n_experts} experts of layer "{name}"'
    return Refusal(layer=name, rule=rule, legal=legal)


def legal_degrees(graph: LayerGraph, tp: int) -> tuple[int, ...]:
    """All numbers of tensor parts that the model allows; up to `tp` where it sets no end."""
    names = _one_of_each_kind(graph)
    plans = [graph.tensor_plan(name) for name in names]
    if None in plans:
        return (1,)
    ends = [
        run.units
        for plan in plans
        if plan is not None
        for cutting in plan.cuttings
        if cutting.side != "vocabulary"
        for run in cutting.runs
        if not run.shared
    ]
    most = min(ends, default=tp)
    return tuple(
        degree
        for degree in range(1, most + 1)
        if all(legal_tp(graph, name, degree) for name in names)
    )


def _one_of_each_kind(graph: LayerGraph) -> list[str]:
    """Layers of one kind are split alike."""
    return list({layer.kind: layer.name for layer in reversed(graph.layers)}.values())[::-1]
