"""What polyreme's loop costs over a bare torch loop, on the same model, data and optimizer.

Both run in the same processes and take turns of a few steps, so whatever else the machine does
meets both. Bare: the transformers model itself under DDP, or FSDP2 layer by layer, with the
global gradient norm and fused AdamW. Prints median step times and their ratio.

    python benchmarks/overhead.py [--size 3M|700M] [--steps 60] [--processes 2] [--bf16]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from llama import RULE, SIZES, RandomTokens, Size, job
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from polyreme.algo.train import Train
from polyreme.cluster.accelerator import detect
from polyreme.data.order import Order
from polyreme.runtime import loop, mesh
from polyreme.runtime.launch import launch
from polyreme.runtime.saver import Metrics
from polyreme.runtime.state import State

TURN = 5


CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Wall seconds of each step, processor seconds of a step in each turn."""

    wall_s: list[float]
    cpu_s: list[float]


class Bare:
    """The loop that one would write by hand."""

    def __init__(
        self, world: mesh.World, source: RandomTokens, size: Size, *, sharded: bool, bf16: bool
    ) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(LlamaConfig(**size.config, use_cache=False))
        model.to(world.device)
        self.world, self.source = world, source
        self.order = Order(
            n_samples=source.n_train, global_batch=size.global_batch, seed=0, tail="drop"
        )
        self.step_s: list[float] = []
        self.bf16 = bf16
        if sharded:
            policy = MixedPrecisionPolicy()
            if bf16:
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for layer in (*model.model.layers, model):
                fully_shard(layer, mp_policy=policy)
            self.model: nn.Module = model
        else:
            self.model = DistributedDataParallel(model)
        self.sharded = sharded
        self.optimizer = RULE.optimizer(self.model.parameters())

    def step(self) -> None:
        """One step, timed."""
        start_s = time.perf_counter()
        indices = self.order.local(len(self.step_s), self.world.rank, self.world.n_ranks)
        batch = {k: v.to(self.world.device) for k, v in self.source.train(indices).items()}
        self.optimizer.zero_grad()
        narrow = self.bf16 and not self.sharded
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=narrow):
            logits = self.model(input_ids=batch["input_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        loss.item()
        self.step_s.append(time.perf_counter() - start_s)


class InTurns:
    """Takes a turn of the bare loop where a checkpoint is due.

    `marks` are the process's seconds at the start of each turn, polyreme's first.
    """

    stage = 0

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._step: int | None = None
        self.marks = [time.process_time()]

    def begin(self, state: State, metrics: Metrics) -> None:
        """Take it."""
        self.marks.append(time.process_time())
        for _ in range(TURN):
            self._bare.step()
        self.marks.append(time.process_time())
        self._step = state.progress.step

    def heard(self, stages: Sequence[int]) -> None:
        """Nothing is under way."""

    def finish(self) -> int | None:
        """Nothing is under way."""
        return self._step


def compare(level: str, size: Size, steps: int, bf16: bool) -> tuple[Timings, Timings]:
    """The bare loop's and polyreme's times on this process."""
    torch.set_num_threads(1)
    world = mesh.open(detect())
    train = Train(
        steps=steps, global_batch=size.global_batch, clip_norm=CLIP_NORM, checkpoint_every=TURN
    )
    precision = "bf16" if bf16 else "fp32"
    ours = job(size, train, level=level, n_ranks=world.n_ranks, precision=precision)
    source = RandomTokens(size.tokens)
    bare = Bare(world, source, size, sharded=level != "none", bf16=bf16)

    in_turns = InTurns(bare)
    outcome = loop.train(ours, world, save=in_turns)
    mesh.close(world)
    turns = [(end - start) / TURN for start, end in pairwise(in_turns.marks)]
    return Timings(wall_s=bare.step_s, cpu_s=turns[1::2]), Timings(
        wall_s=list(outcome.step_s), cpu_s=turns[::2]
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--size", choices=tuple(SIZES), default="3M")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    print("median of a step     wall ms                    processor ms")
    print("bare     level        bare  polyreme   ratio      bare  polyreme   ratio")
    for name, level in (("DDP", "none"), ("FSDP2", "params")):
        results = launch(
            compare,
            (level, SIZES[options.size], options.steps, options.bf16),
            n_processes=options.processes,
        )
        bare, ours = results[0]
        print(
            f"{name:8} {level:8}",
            _columns(bare.wall_s[2 * TURN :], ours.wall_s[2 * TURN :]),
            _columns(bare.cpu_s[2:], ours.cpu_s[2:]),
        )


def _columns(bare_s: list[float], ours_s: list[float]) -> str:
    bare_ms, ours_ms = (1e3 * statistics.median(each) for each in (bare_s, ours_s))
    return f"{bare_ms:9.1f} {ours_ms:9.1f} {ours_ms / bare_ms:7.3f}"


if __name__ == "__main__":
    main()
