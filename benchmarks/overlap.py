"""What running communication behind computation saves: each switch on and off, in turns.

All variants train the same small Llama in the same processes, a few steps a turn, so whatever else
the machine does meets all of them. Between processes of one machine there is no slow network; a
private one is had from Linux (as root): its loopback passes 200 Mbit/s, both directions together.

    python benchmarks/overlap.py [--size 3M|700M] [--rounds 5] [--processes 2] [--bf16]
    unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 200mbit burst 256kb \
        latency 1s && python benchmarks/overlap.py'
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

import msgspec
import torch
from llama import SIZES, Size, job

from polyreme.algo.train import Train
from polyreme.cluster.accelerator import detect
from polyreme.runlog import Event, StepEvent
from polyreme.runtime import loop, mesh
from polyreme.runtime.device_time import FIRST
from polyreme.runtime.launch import launch

WARM, TAKEN = 3, 5  # steps
OFF = {"overlap": False, "prefetch": False, "decouple": False, "priority": False}
VARIANTS = (
    ("none", "nothing", {}),
    ("none", "overlap", {"overlap": True}),
    ("none", "overlap, decouple", {"overlap": True, "decouple": True}),
    ("none", "overlap, decouple, priority", {"overlap": True, "decouple": True, "priority": True}),
    ("params", "nothing", {}),
    ("params", "prefetch", {"prefetch": True}),
)
Times = list[tuple[float, float, float]]  # step, blocked, hidden seconds of steps


class Log:
    """Keeps events in place of a file."""

    attempt, t = 0, 0.0

    def __init__(self) -> None:
        self.steps: list[StepEvent] = []

    def write(self, event: Event) -> None:
        """Keep a step."""
        if isinstance(event, StepEvent):
            self.steps.append(event)


def measure(size: Size, rounds: int, bf16: bool, bucket_bytes: int) -> list[Times]:
    """Times of each variant on this process."""
    torch.set_num_threads(1)
    world = mesh.open(detect())
    found: list[Times] = [[] for _ in VARIANTS]
    # The shares that a device says are of a step before these.
    warm = WARM if world.accelerator.on_host else FIRST + 1
    for _ in range(rounds):
        for (level, _, switches), times in zip(VARIANTS, found, strict=True):
            train = Train(steps=warm + TAKEN, global_batch=size.global_batch, clip_norm=1.0)
            precision = "bf16" if bf16 else "fp32"
            ours = job(size, train, level=level, n_ranks=world.n_ranks, precision=precision)
            plan = msgspec.structs.replace(
                ours.plan, bucket_bytes=bucket_bytes, **{**OFF, **switches}
            )
            log = Log()
            loop.train(dataclasses.replace(ours, plan=plan), world, log=log)
            times += [(s.step_s, s.comm_s + s.wait_s, s.hidden_s) for s in log.steps[warm:]]
    mesh.close(world)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--size", choices=tuple(SIZES), default="3M")
    parser.add_argument("--bucket-bytes", type=int, default=2**20)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    arguments = (SIZES[options.size], options.rounds, options.bf16, options.bucket_bytes)
    found = launch(measure, arguments, n_processes=options.processes)[0]
    print("level    behind computation              step ms  ratio  blocked ms  hidden ms")
    for (level, name, _), times in zip(VARIANTS, found, strict=True):
        step, blocked, hidden = (
            1e3 * statistics.median(column) for column in zip(*times, strict=True)
        )
        if name == "nothing":
            base = step
        print(f"{level:8} {name:30} {step:8.1f} {step / base:6.3f} {blocked:11.1f} {hidden:10.1f}")


if __name__ == "__main__":
    main()
