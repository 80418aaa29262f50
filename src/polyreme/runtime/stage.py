"""The layers of a stage as one module, and where each parameter of the whole model lies in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..graph.layer import LayerGraph


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter or buffer of the whole model and the (module, attribute) places that hold it.

    Tied parameters have one slot with several places.
    """

    name: str
    layer: str
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def tensor(self) -> torch.Tensor:
        """What the first place holds now."""
        module, attribute = self.places[0]
        tensor: torch.Tensor = getattr(module, attribute)
        return tensor

    def put(self, parameter: nn.Parameter) -> None:
        """Place a parameter everywhere."""
        for module, attribute in self.places:
            setattr(module, attribute, parameter)


class Body(nn.Module):
    """A layer's module as the stage calls it: recomputed in the backward pass if so planned."""

    def __init__(self, module: nn.Module, *, recompute: bool) -> None:
        super().__init__()
        self.module = module
        self.recompute = recompute
        self._before_first: list[Callable[[], None]] = []

    def call_before_first(self, function: Callable[[], None]) -> None:
        """Call a function once, in the first forward pass, when all parameters are whole."""
        self._before_first.append(function)

    def forward(self, *inputs: Any) -> Any:
        """The layer's outputs."""
        while self._before_first:
            self._before_first.pop()()
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.module, *inputs, use_reentrant=False)
        return self.module(*inputs)


class Stage(nn.Module):
    """Layers called in the graph's order; an output is dropped after its last reader."""

    def __init__(self, graph: LayerGraph, bodies: Mapping[str, Body], dtype: torch.dtype) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies.values())
        self._layers = tuple(graph.layer(name) for name in bodies)
        self._output = graph.output
        self._fields = tuple(graph.inputs)
        self._dtype = dtype
        last: dict[str, int] = {}
        for index, layer in enumerate(self._layers):
            last |= dict.fromkeys((*layer.inputs, *_outputs(layer.name, layer.outputs)), index)
        self._drop: list[list[str]] = [[] for _ in self._layers]
        for name, index in last.items():
            if name != self._output:
                self._drop[index].append(name)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits of a batch; floating fields are cast to the compute dtype."""
        values: dict[str, Any] = {
            f"batch:{name}": batch[name].to(self._dtype)
            if batch[name].is_floating_point()
            else batch[name]
            for name in self._fields
        }
        for layer, body, drop in zip(self._layers, self.bodies, self._drop, strict=True):
            result = body(*(values[name] for name in layer.inputs))
            names = _outputs(layer.name, layer.outputs)
            if len(names) == 1:
                values[names[0]] = result
            else:
                values |= zip(names, result, strict=True)
            for name in drop:
                del values[name]
        logits: torch.Tensor = values[self._output]
        return logits


def _outputs(layer: str, outputs: Mapping[str, Any]) -> list[str]:
    return [f"{layer}.{output}" for output in outputs]
