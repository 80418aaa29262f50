"""CIFAR-10 as one .npz of arrays, from the archive of JPEG scans in a folder of data."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def unpack(data: Path, to: Path, images: int, seed: int = 0) -> Path:
    """The first `images` of a seeded shuffle of the training images, and all test images."""
    path = to / f"cifar10-{images}.npz"
    if path.exists():
        return path
    packed = np.load(data / "cifar10" / "cifar10_full_jpegscan.npz")
    chosen = np.random.default_rng(seed).permutation(50_000)[:images]
    arrays = {
        "x_train": _decoded(packed, "train")[chosen],
        "y_train": packed["train_y"][chosen].astype(np.int64),
        "x_test": _decoded(packed, "test"),
        "y_test": packed["test_y"].astype(np.int64),
    }
    to.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def _decoded(packed: np.lib.npyio.NpzFile, part: str) -> np.ndarray:
    header, scans = packed["header"].tobytes(), packed[f"{part}_scan"].tobytes()
    ends = np.cumsum(packed[f"{part}_len"], dtype=np.int64)
    starts = np.concatenate([[0], ends[:-1]])
    return np.stack(
        [
            np.asarray(Image.open(io.BytesIO(header + scans[a:b])))
            for a, b in zip(starts, ends, strict=True)
        ]
    )
