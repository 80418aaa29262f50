"""Images a second from an .npz of bytes, as `polyreme train` reads them, and beside a step.

``python benchmarks/read_images.py [--images 20000] [--side 32] [--batches 1024 8192]``

One core reads, shifts by up to 4 pixels and mirrors. `by NumPy` does the same with array operations
over the batch, and their numbers are compared bit by bit. `waited` is the share of the time that a
thread which only launches small operations (a step that never leaves Python for long) waits for
shuffled batches read ahead by the prefetcher, and `slower` what the reading costs its launches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from polyreme.data import shuffle
from polyreme.data.class_options import Arrays, Augment
from polyreme.data.order import arrange
from polyreme.data.prefetch import Prefetcher
from polyreme.data.source import Source

SHIFT, SEED, REPEATS = 4, 0, 5


def by_numpy(bytes_NHWC: np.ndarray, indices: np.ndarray, epoch: int) -> np.ndarray:
    """[N, C, H, W] by one array operation after the other."""
    images = bytes_NHWC.transpose(0, 3, 1, 2)[indices].astype(np.float32) / np.float32(255) * 2 - 1
    words = shuffle.mix(indices.astype(np.uint64) ^ np.uint64(shuffle.key(SEED, epoch)))
    draws = []
    for _ in range(2):
        draws.append(SHIFT - (words % np.uint64(2 * SHIFT + 1)).astype(np.int64) + SHIFT)
        words = shuffle.mix(words)
    padded = np.pad(images, ((0, 0), (0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)), mode="edge")
    windows = sliding_window_view(padded, images.shape[2:], axis=(2, 3))
    changed = windows[np.arange(len(images)), :, draws[0], draws[1]]
    mirrored = words & np.uint64(1) == 1
    changed[mirrored] = changed[mirrored, ..., ::-1]
    return np.ascontiguousarray(changed)


def rate(read: Callable[[int], object], batch: int) -> float:
    """Images a second, the median of several batches after the first."""
    took_s = []
    for number in range(REPEATS + 1):
        begun_s = time.perf_counter()
        read(number)
        took_s.append(time.perf_counter() - begun_s)
    return batch / statistics.median(took_s[1:])


def launches(seconds: float) -> int:
    """How many small operations this thread launches meanwhile."""
    x, n, end_s = torch.ones(8), 0, time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        x = x * 1.0
        n += 1
    return n


def beside(read: Callable[[int], object], step_s: float) -> tuple[float, float]:
    """Share of the time that is waited for batches, and by how much fewer are launched."""
    n_steps = max(10, round(2 / step_s))
    alone = sum(launches(step_s) for _ in range(n_steps))
    waited_s, launched, begun_s = 0.0, 0, time.perf_counter()
    with Prefetcher(read, 0, n_steps) as ahead:
        for _ in range(n_steps):
            asked_s = time.perf_counter()
            next(ahead)
            waited_s += time.perf_counter() - asked_s
            launched += launches(step_s)
    return waited_s / (time.perf_counter() - begun_s), 1 - launched / alone


def row(source: Source, images: np.ndarray, batch: int, step_s: float) -> str:
    """One line of the table."""
    draw = np.random.default_rng(0)
    batches = [draw.permutation(len(images))[:batch] for _ in range(REPEATS + 1)]

    def ours(number: int) -> torch.Tensor:
        return source.train(batches[number % len(batches)], number)["pixel_values"]

    def plain(number: int) -> np.ndarray:
        return by_numpy(images, batches[number % len(batches)], number)

    here, there = rate(ours, batch), rate(plain, batch)
    same = "yes" if np.array_equal(ours(1).numpy(), plain(1)) else "no"
    order = arrange(source, None, n_workers=1, global_batch=batch, seed=SEED, tail="drop")

    def ordered(step: int) -> dict[str, torch.Tensor]:
        return source.train(order.local(step, 0, 1), order.epoch(step, 0, 1))

    ordered(0)  # what is compiled is loaded
    waited, slower = beside(ordered, step_s)
    shares = f"{100 * waited:.1f} % | {100 * slower:.1f} %"
    return f"| {batch} | {here:,.0f} | {there:,.0f} | {here / there:.1f} | {same} | {shares} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=(1024, 8192))
    parser.add_argument("--step", type=float, default=20.0, help="ms of a step of 1024 images")
    given = parser.parse_args()
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (given.images, given.side, given.side, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "images.npz")
        np.savez(path, x_train=images, y_train=np.arange(given.images) % 10)
        options = Arrays(path=str(path), heldout=0, augment=Augment(shift=SHIFT, flip=True))
        source = options.open(None, SEED)
    print("| batch | images/s | by NumPy | times | same bits | waited | slower |")
    print("|---|---|---|---|---|---|---|")
    for batch in given.batches:
        print(row(source, images, batch, given.step / 1e3 * batch / 1024), flush=True)


if __name__ == "__main__":
    main()
