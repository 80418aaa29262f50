"""Keeps the samples of a rank whose loss or gradient was not finite, for whoever looks for why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch  # noqa: TC002
from safetensors.torch import save_file


def save_samples(
    folder: Path,
    *,
    step: int,
    rank: int,
    reason: str,
    ids: Sequence[Sequence[int]],
    read: Sequence[Mapping[str, torch.Tensor] | None],
) -> Path:
    """Write ``step-N.rank-R.safetensors``: each microbatch's fields as the model was given them.

    Tensors are named ``MICROBATCH.FIELD``; the metadata holds step, rank, reason and, as JSON,
    ``sample_ids``: the sample numbers by microbatch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}.rank-{rank}.safetensors"
    tensors = {
        f"{index}.{name}": field.contiguous()
        for index, fields in enumerate(read)
        for name, field in (fields or {}).items()
    }
    metadata = {
        "step": str(step),
        "rank": str(rank),
        "reason": reason,
        "sample_ids": json.dumps([list(part) for part in ids]),
    }
    save_file(tensors, path, metadata)
    return path
