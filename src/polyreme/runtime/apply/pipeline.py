"""The pipeline axis: which layers a process holds, and who else holds the same parameters."""

from __future__ import annotations

from collections.abc import Mapping

from ...graph.layer import LayerGraph
from ...plan.grid import Grid
from ...plan.ir import Plan


def holders(graph: LayerGraph, plan: Plan, grid: Grid) -> Mapping[str, tuple[int, ...]]:
    """The pipeline ranks that hold each parameter and buffer, by its whole-model name, ascending.

    Several do where weights are tied across stages, or a stage has two placements.
    """
    found: dict[str, set[int]] = {}
    for stage, pipes in zip(plan.stages, grid.holders, strict=True):
        for name in stage.layers:
            for whole in graph.layer(name).params.values():
                found.setdefault(whole, set()).update(pipes)
    return {name: tuple(sorted(pipes)) for name, pipes in found.items()}
