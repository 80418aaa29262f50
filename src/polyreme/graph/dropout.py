"""A model without dropout: what two runs of it compute can then be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.modules.dropout import _DropoutNd as Dropout

from .layer import Layer, LayerGraph

if TYPE_CHECKING:
    from torch import nn

    from .tensor import TensorPlan


def without_dropout(graph: LayerGraph) -> LayerGraph:
    """The same graph, whose modules drop nothing."""
    return LayerGraph(
        name=graph.name,
        layers=graph.layers,
        inputs=graph.inputs,
        output=graph.output,
        builder=_DropsNothing(graph),
        labels=graph.labels,
    )


def drop_nothing(module: nn.Module) -> None:
    """Set every rate of dropout in the module to 0, in place.

    Rates are `p` of torch's dropout modules and any number in an attribute whose name has "drop"
    in it. One that is written into a forward method as a constant cannot be seen.
    """
    for child in module.modules():
        for name, value in vars(child).items():
            if isinstance(value, float) and "drop" in name.lower():
                setattr(child, name, 0.0)
        if isinstance(child, Dropout):
            child.p = 0.0


class _DropsNothing:
    def __init__(self, graph: LayerGraph) -> None:
        self._graph = graph

    def build(self, layer: Layer) -> nn.Module:
        module = self._graph.build(layer.name)
        drop_nothing(module)
        return module

    def initialise(self, layer: Layer, module: nn.Module, seed: int) -> None:
        self._graph.initialise(layer.name, module, seed)

    def tensor_plan(self, layer: Layer) -> TensorPlan | None:
        return self._graph.tensor_plan(layer.name)
