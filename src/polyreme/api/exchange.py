"""`polyreme weights`: Hugging Face's safetensors to a checkpoint, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .. import spec as specs
from ..errors import ConfigError, Violation
from . import folders

if TYPE_CHECKING:
    from ..runtime.weights import Moved

Cast = Literal["float32", "bfloat16", "float16"]


def move_weights(
    direction: Literal["import", "export"],
    spec: specs.Spec,
    *,
    source: Path,
    to: Path,
    dtype: Cast | None,
) -> Moved:
    """See `api.weights`."""
    if direction == "import" and dtype is not None:
        rule, legal = "is for export; an import keeps what is stored", "no --dtype"
        raise ConfigError([Violation(path="--dtype", value=dtype, rule=rule, legal=legal)])
    import torch

    from ..runtime.weights import import_weights, refuse_taken
    from ..runtime.weights_export import export_weights
    from .problem import graph_of

    refuse_taken(to)
    graph = graph_of(spec)
    with folders.claimed(to):
        if direction == "import":
            return import_weights(graph, source, to)
        cast = None if dtype is None else getattr(torch, dtype)
        return export_weights(graph, source, to, dtype=cast)
