"""Models of presets on clusters of presets, to be planned and not run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from polyreme import spec as specs
from polyreme.api import problem as problems

WORDS = {"kind": "tokens", "path": "tokens.bin", "vocab": 30000}  # named, never read
LENGTHS = {"t5-large": 512}  # tokens, where they are not 2,048
SIDE, CLASSES = 224, 10


def posed(preset: str, cluster: str, batch: int) -> problems.Problem:
    """A model in bf16 with so many samples a step."""
    train: dict[str, Any] = {"steps": 1, "global_batch": batch, "precision": "bf16"}
    if not preset.startswith(("swin", "vit")):
        return _posed(preset, WORDS, {**train, "seq_len": LENGTHS.get(preset, 2048)}, cluster)
    with tempfile.TemporaryDirectory() as folder:  # sizes and classes are read from files
        for number in range(CLASSES):
            (Path(folder) / f"{number}").mkdir()
            Image.new("RGB", (SIDE, SIDE)).save(Path(folder) / f"{number}" / "a.png")
        return _posed(preset, {"kind": "images", "path": folder, "heldout": 0}, train, cluster)


def _posed(
    preset: str, data: dict[str, Any], train: dict[str, Any], cluster: str
) -> problems.Problem:
    document = {"model": {"preset": preset}, "data": data, "train": train}
    return problems.pose(specs.parse(document, trusted=("data",)), cluster=cluster)
