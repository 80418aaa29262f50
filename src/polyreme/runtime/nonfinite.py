"""Steps that are not finite: what is said of them, and the samples kept for who looks for why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import tensorfile

if TYPE_CHECKING:
    import torch


def cause(reason: str, ranks: Sequence[int]) -> str:
    """Why a step is skipped, with the ranks to blame if any are.

    >>> cause("loss is not finite", (0, 2))
    'loss is not finite on rank 0, 2'
    """
    return f"{reason} on rank {', '.join(map(str, ranks))}" if ranks else reason


def remedy(lr: float, clip_norm: float | None) -> str:
    """What to try where losses or gradients are not finite.

    >>> remedy(0.1, None)
    'try a lower data_parallel.rule.lr (it is 0.1) or train.clip_norm (it is not set)'
    """
    clip = "not set" if clip_norm is None else f"{clip_norm:g}"
    return f"try a lower data_parallel.rule.lr (it is {lr:g}) or train.clip_norm (it is {clip})"


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
    ``sample_ids``: the sample numbers by microbatch. The file appears whole.

    Raises OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step}.rank-{rank}.safetensors"
    tensors = {
        f"{index}.{name}": field
        for index, fields in enumerate(read)
        for name, field in (fields or {}).items()
    }
    metadata = {
        "step": str(step),
        "rank": str(rank),
        "reason": reason,
        "sample_ids": json.dumps([list(part) for part in ids]),
    }
    partial = path.with_name(f".{path.name}.partial")
    like = {name: tensorfile.entry(tensor) for name, tensor in tensors.items()}
    try:
        tensorfile.write(partial, like, map(tensorfile.content, tensors.values()), metadata)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    return path
