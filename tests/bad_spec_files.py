"""Files that sound specs name; see bad_specs."""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path


def files(folder: Path) -> None:
    """What the sound documents name."""
    (folder / "corpus.txt").write_text("Some text. " * 40)
    (folder / "tokens.bin").write_bytes(bytes(512))
    (folder / "seconds.txt").write_text("0.1 0.2\n")
    with zipfile.ZipFile(folder / "arrays.npz", "w") as packed:
        for name in ("x_train", "y_train"):
            packed.writestr(f"{name}.npy", b"")
    with zipfile.ZipFile(folder / "ratings.npz", "w") as packed:
        for name in ("train", "test", "valid"):
            packed.writestr(f"{name}.npy", b"")
    (folder / "images" / "a").mkdir(parents=True)
    (folder / "points.svm").write_text("1 1:2\n")
    (folder / "rows").mkdir()
    for name in ("indptr", "indices", "values", "n_features", "labels"):
        (folder / "rows" / f"{name}.npy").write_bytes(b"")
    (folder / "dataset").mkdir()
    (folder / "dataset" / "state.json").write_text("{}")
    (folder / "model.py").write_text("def make(): ...\n")
    (folder / "model").mkdir()
    config = {"model_type": "llama", "vocab_size": 256}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    (folder / "cluster.toml").write_text(
        'device_types.a.preset = "H100"\nhosts = [{ device_type = "a", devices = 8 }]\n'
    )
    (folder / "plan.json").write_text("{}")
