"""What saving costs the steps meanwhile: turns of a few steps, every other with a checkpoint.

One run, the small Llama of the quickstart; a turn begins with a save (copied at once, written
while its steps go on) or without. Prints the median turn of either kind and their ratio, how long
steps stood still for a save, and how long it took to write.

    python benchmarks/checkpoint.py [--turns 40] [--steps 10] [--processes 2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from llama import SIZES, job

from polyreme.algo.train import Train
from polyreme.cluster.accelerator import detect
from polyreme.runlog import CheckpointEvent, Writer, read
from polyreme.runtime import loop, mesh
from polyreme.runtime.launch import launch
from polyreme.runtime.saver import Metrics, Saver
from polyreme.runtime.state import State


class EveryOther:
    """Saves at every second call, and notes when it was called."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.at_s: list[float] = []
        self._step: int | None = None

    @property
    def stage(self) -> int:
        """The saver's."""
        return self._saver.stage

    def begin(self, state: State, metrics: Metrics) -> None:
        """Save at even turns."""
        self.at_s.append(time.perf_counter())
        self._step = state.progress.step
        if len(self.at_s) % 2:
            self._saver.begin(state, metrics)

    def heard(self, stages: Sequence[int]) -> None:
        """Passed on."""
        self._saver.heard(stages)

    def finish(self) -> int | None:
        """Passed on; the step of the last call, saved or not."""
        self._saver.finish()
        return self._step


def measure(level: str, folder: Path, n_turns: int, n_steps: int) -> list[float]:
    """When each turn of this process began."""
    torch.set_num_threads(1)
    world = mesh.open(detect())
    size = SIZES["3M"]
    train = Train(
        steps=(n_turns + 1) * n_steps, global_batch=size.global_batch, checkpoint_every=n_steps
    )
    run = job(size, train, level=level, n_ranks=world.n_ranks)
    log = Writer(folder / "log.jsonl") if world.is_first else None
    saver = EveryOther(Saver(folder, run.graph, world, keep=1, log=log))
    loop.train(run, world, log=log, save=saver)
    mesh.close(world)
    return saver.at_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    print(f"turns of {options.steps} steps, medians")
    print("level     without ms   saving ms   ratio   stood still ms   written in ms")
    for level in ("none", "params"):
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=".") as folder:
            arguments = (level, Path(folder), options.turns, options.steps)
            at_s = launch(measure, arguments, n_processes=options.processes)[0]
            events = list(read(Path(folder) / "log.jsonl"))
        turns_ms = [1e3 * (end - start) for start, end in pairwise(at_s)]
        saving, without = statistics.median(turns_ms[2::2]), statistics.median(turns_ms[1::2])
        saves = [event for event in events if isinstance(event, CheckpointEvent)]
        still = statistics.median(1e3 * event.seconds for event in saves)
        written = statistics.median(1e3 * (event.write_s or 0.0) for event in saves)
        print(
            f"{level:8} {without:11.0f} {saving:11.0f} {saving / without:7.3f} "
            f"{still:16.1f} {written:15.0f}"
        )


if __name__ == "__main__":
    main()
