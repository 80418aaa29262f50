"""Where in a layer's forward pass its recomputation ends: with the last tensor that is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..graph.layer import LayerGraph

if TYPE_CHECKING:
    import torch


def saved_after(graph: LayerGraph, name: str) -> frozenset[str]:
    """Paths of modules in a layer after whose outputs something is saved for the backward pass.

    Found by playing the layer on meta, a microbatch of one sample. What comes behind the last saved
    tensor is not computed again: torch's checkpoints stop there.
    """
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    module = graph.build(name).train()
    n_saved = 0
    at: dict[str, int] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal n_saved
        n_saved += 1
        return tensor

    def note(path: str) -> Any:
        def after(*_: Any) -> None:
            at[path] = n_saved

        return after

    handles = [child.register_forward_hook(note(path)) for path, child in module.named_modules()]
    with torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor):
        module(*_inputs(graph, name))
    for handle in handles:
        handle.remove()
    return frozenset(path for path, count in at.items() if count < n_saved)


def _inputs(graph: LayerGraph, name: str) -> list[torch.Tensor]:
    import torch

    found = []
    for value in graph.layer(name).inputs:
        source, _, output = value.rpartition(".")
        is_read = value.startswith("batch:")
        spec = graph.inputs[value[6:]] if is_read else graph.layer(source).outputs[output]
        dtype = torch.float32 if spec.dtype == "compute" else getattr(torch, spec.dtype)
        tensor = torch.empty((1, *spec.shape), dtype=dtype, device="meta")
        found.append(tensor.requires_grad_(tensor.is_floating_point() and not is_read))
    return found
