"""``final.safetensors``: the whole trained model in one file, written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from .. import __version__
from ..errors import RunError
from ..graph.layer import LayerGraph
from ..runlog import room
from . import tensorfile
from .gathering import forms, full_parameters, weights
from .state import State

LIMIT_BYTES = 8 * 10**9
_META = torch.device("meta")


def save_final(
    state: State, run_folder: Path, *, graph: LayerGraph, limit_bytes: int | None = LIMIT_BYTES
) -> Path | None:
    """Gather weights and buffers on rank 0 and write them; None if they exceed `limit_bytes`.

    All ranks call it together. Tied weights are stored once, under their owner's name; the
    metadata ``tied`` lists the layers that share them. The file appears whole.

    Raises RunError on all ranks if it cannot be written.
    """
    known = forms(weights(state.applied), state.applied, state.world)
    like = {name: tensorfile.entry(form.empty(_META)) for name, form in known.items()}
    n_bytes = sum(size for _, _, size in like.values())
    if limit_bytes is not None and n_bytes > limit_bytes:
        return None
    shared: dict[str, list[str]] = {}
    for layer in graph.layers:
        for name in layer.ties:
            shared.setdefault(name, []).append(layer.name)
    metadata = {"format": "pt", "model": graph.name, "polyreme": __version__}
    if shared:
        metadata["tied"] = json.dumps(shared)
    path = run_folder / "final.safetensors"
    partial = path.with_name(f".{path.name}.partial")
    whole = full_parameters(state)
    failed = None
    if state.world.is_first:
        try:
            tensorfile.write(partial, like, (tensorfile.content(t) for _, t in whole), metadata)
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            left = room(error, run_folder)
            failed = f"{path}: {error.strerror}; it needs {n_bytes:,} bytes, {left}"
    for _ in whole:  # every rank takes part in the gathering to its end
        pass
    failed = state.world.gather(failed)[0]
    if failed is not None:
        raise RunError(failed, rank=0, op="save")
    return path
