"""The mean of models that was evaluated last: what those begin with that are begun anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    import torch

_NAME = "mean.safetensors"


def write(folder: Path, params: torch.Tensor) -> None:
    """Leave it where members look for it."""
    partial = folder / f"{_NAME}.partial"
    save_file({"params": params}, partial)
    partial.replace(folder / _NAME)


def read(folder: Path, first: torch.Tensor) -> torch.Tensor:
    """What was left there; the first model before anything was."""
    path = folder / _NAME
    return load_file(path)["params"].to(first) if path.exists() else first
