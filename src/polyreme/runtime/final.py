"""``final.safetensors``: the whole trained model in one file, written tensor by tensor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from .. import __version__
from ..graph.layer import LayerGraph
from .state import State, full_parameters

LIMIT_BYTES = 8 * 10**9
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_final(
    state: State, run_folder: Path, *, graph: LayerGraph, limit_bytes: int | None = LIMIT_BYTES
) -> Path | None:
    """Gather weights and buffers on rank 0 and write them; None if they exceed `limit_bytes`.

    All ranks call it together. Tied weights are stored once, under their owner's name; the
    metadata ``tied`` lists the layers that share them.
    """
    live = dict(state.applied.masters)
    live |= {slot.name: slot.tensor for slot in state.applied.buffers}
    if limit_bytes is not None and sum(map(_n_bytes, live.values())) > limit_bytes:
        return None
    shared: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in layer.ties:
            shared.setdefault(name, []).append(layer.name)
    metadata = {"format": "pt", "model": graph.name, "polyreme": __version__}
    if shared:
        metadata["tied"] = json.dumps(shared)
    path = run_folder / "final.safetensors"
    whole = full_parameters(state)
    if state.world.is_first:
        write(path, live, whole, metadata)
    else:
        for _ in whole:
            pass
    state.world.barrier()
    return path


def write(
    path: Path,
    like: Mapping[str, torch.Tensor],
    tensors: Iterator[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file from tensors that come one at a time, in the order of `like`.

    `like` gives their names, global shapes and dtypes beforehand. The file appears whole.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in like.items():
        start, end = end, end + _n_bytes(tensor)
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for (expected, shape_of), (name, tensor) in zip(like.items(), tensors, strict=True):
            assert (name, tensor.shape) == (expected, shape_of.shape), "order and shapes as stated"
            assert tensor.dtype == shape_of.dtype, "dtype as stated"
            _append(file, tensor)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _append(file: BinaryIO, tensor: torch.Tensor) -> None:
    if tensor.numel():
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)


def _n_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the whole tensor, sharded or not."""
    return math.prod(tensor.shape) * tensor.element_size()
