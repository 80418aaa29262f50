"""Images and their classes as one .npz of arrays, from a folder of data."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def unpack(task: str, data: Path, to: Path, images: int, seed: int = 0) -> Path:
    """The first `images` of a seeded shuffle of the training images, and all test images.

    `task` is ``cifar10``, read from an archive of JPEG scans, or ``mnist``.
    """
    path = to / f"{task}-{images}.npz"
    if path.exists():
        return path
    arrays = {"cifar10": _cifar10, "mnist": _mnist}[task](data)
    chosen = np.random.default_rng(seed).permutation(len(arrays["y_train"]))[:images]
    arrays |= {name: arrays[name][chosen] for name in ("x_train", "y_train")}
    to.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path


def _cifar10(data: Path) -> dict[str, np.ndarray]:
    packed = np.load(data / "cifar10" / "cifar10_full_jpegscan.npz")
    return {
        "x_train": _decoded(packed, "train"),
        "y_train": packed["train_y"].astype(np.int64),
        "x_test": _decoded(packed, "test"),
        "y_test": packed["test_y"].astype(np.int64),
    }


def _mnist(data: Path) -> dict[str, np.ndarray]:
    packed = np.load(data / "mnist" / "mnist.npz")
    return {name: packed[name] for name in ("x_train", "y_train", "x_test", "y_test")}


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
