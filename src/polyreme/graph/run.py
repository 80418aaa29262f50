"""Plays a graph's modules over named values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .layer import LayerGraph


def run(
    graph: LayerGraph, modules: Mapping[str, Callable[..., Any]], batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The logits of a batch: layers in order, each value dropped after its last reader.

    `modules` holds each layer's module by its name; `batch` the sample fields, stacked. Fields
    that no layer reads (labels) are ignored.
    """
    readers = Counter(name for layer in graph.layers for name in layer.inputs)
    readers[graph.output] += 1
    values = {f"batch:{name}": batch[name] for name in graph.inputs}
    for layer in graph.layers:
        arguments = []
        for name in layer.inputs:
            readers[name] -= 1
            arguments.append(values[name] if readers[name] else values.pop(name))
        out = modules[layer.name](*arguments)
        del arguments  # values die with their last reader, not one layer later
        outputs = out if isinstance(out, tuple) else (out,)
        for output, value in zip(layer.outputs, outputs, strict=True):
            if readers[f"{layer.name}.{output}"]:
                values[f"{layer.name}.{output}"] = value
    return values[graph.output]
