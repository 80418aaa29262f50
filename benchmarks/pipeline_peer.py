"""Step times of our pipelines beside torch.distributed.pipelining's, in the same processes.

Layers that sleep as long in each of their passes (forward, the gradient of the input, that of the
weight) stand for work, so that a step lasts as its order has it and a few cores do for many
processes. Both train the same layers on the same ranks and take turns; each step ends with an
update. Ours has in it also what a run asks for: the norm of the gradients and the exchange in which
all ranks agree on the step. Prints medians over the rounds, the ratio of the two in each round, and
the seconds of our order on the clock that has no overhead.

    python benchmarks/pipeline_peer.py [--processes 2 4] [--orders gpipe 1f1b ...]
                                       [--microbatches 8] [--rounds 7] [--sleep-ms 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from peer import SCHEDULES, peer
from polyreme.algo.rule import SGD
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.plan.order import ORDERS
from polyreme.plan.play import Costs, play
from polyreme.runtime import mesh
from polyreme.runtime.driver import Driver
from polyreme.runtime.launch import PRELOAD, Launcher
from polyreme.runtime.making import apply
from polyreme.runtime.passes import Microbatch
from tiny import HIDDEN, TOKENS, VOCABULARY, Case, Embed, Head, Model

ROWS, WARM_UP = 2, 2  # of a microbatch; rounds
RULE = SGD(lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table."""

    order: str
    n_processes: int
    n_microbatches: int
    n_rounds: int
    sleep_s: float

    @property
    def n_stages(self) -> int:
        """Of one layer that sleeps each."""
        return self.n_processes * ORDERS[self.order].chunks

    def clock_s(self) -> float:
        """A step of our order in which passes take as long as they sleep, and the rest no time."""
        costs = Costs.equal(
            self.n_stages, forward=self.sleep_s, inputs=self.sleep_s, weights=self.sleep_s
        )
        actions = ORDERS[self.order].actions(self.n_processes, self.n_microbatches, costs)
        return play(actions, self.n_stages, costs).makespan_s


class Rest(torch.autograd.Function):
    """The value and its gradient go through, each after a while."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, sleep_s: float) -> torch.Tensor:
        """After the product."""
        time.sleep(sleep_s)
        ctx.sleep_s = sleep_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """On the way to the input, before the product's own backward."""
        time.sleep(ctx.sleep_s)
        return gradient, None


class Sleeper(nn.Module):
    """A product that takes its time."""

    def __init__(self, sleep_s: float) -> None:
        super().__init__()
        self.sleep_s = sleep_s
        self.linear = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product, after a while."""
        slept: torch.Tensor = Rest.apply(self.linear(x), self.sleep_s)  # type: ignore[no-untyped-call]
        return slept


@dataclass(frozen=True)
class Sleepers(Model):
    """A tiny model of layers that sleep."""

    sleep_s: float = 0.0

    def makers(self) -> dict[str, Callable[[], nn.Module]]:
        """An embedding, the layers, a head."""
        names = (f"block.{number}" for number in range(self.n_blocks))
        return {
            "embed": Embed,
            **dict.fromkeys(names, lambda: Sleeper(self.sleep_s)),
            "head": Head,
        }


def sleep_for_weights(module: nn.Module) -> None:
    """Where the gradient of a sleeping layer's weight comes, it comes after a while.

    A hook of the weight is called in a whole backward pass and in the weight half; not, or with
    None, in the input half. So it is in both runtimes.
    """
    for each in module.modules():
        if isinstance(each, Sleeper):
            seconds = each.sleep_s
            each.linear.weight.register_hook(
                lambda gradient, seconds=seconds: None if gradient is None else time.sleep(seconds)
            )


def compare(setting: Setting) -> tuple[list[float], list[float]]:
    """Seconds of our steps and of the peer's, in turns, on this process."""
    torch.set_num_threads(1)
    world = mesh.open(HostAccelerator())
    n = setting.n_microbatches
    model = Sleepers(n_blocks=setting.n_stages, sleep_s=setting.sleep_s)
    plan = {
        "pp": setting.n_processes,
        "order": setting.order,
        "microbatches": n,
        "precision": "fp32",
        "cuts": [2, *[1] * (setting.n_stages - 2), 2],
    }
    job = Case(model=model, plan=plan, global_batch=n * ROWS, rule=RULE).job()
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCABULARY, (2, n * ROWS, TOKENS), generator=generator)

    applied = apply(job.graph, job.plan, world)
    driver = Driver(applied, world, RULE)
    microbatches = {
        number: Microbatch(fields={"input_ids": x}, labels=y, n_samples=ROWS, n_rows=ROWS)
        for number, (x, y) in enumerate(zip(ids.chunk(n), labels.chunk(n), strict=True))
    }
    theirs = peer(job, world, setting.order)
    optimizer = RULE.optimizer(theirs.parameters.values())
    sleep_for_weights(applied.stage)
    sleep_for_weights(theirs.modules)

    def our_step() -> None:
        driver.step(microbatches, nominal_weight=float(labels.numel()))

    def their_step() -> None:
        optimizer.zero_grad()
        theirs.step(ids, labels)
        optimizer.step()

    ours_s, theirs_s = [], []
    for _ in range(WARM_UP + setting.n_rounds):
        ours_s.append(_timed(our_step, world))
        theirs_s.append(_timed(their_step, world))
    mesh.close(world)
    return ours_s[WARM_UP:], theirs_s[WARM_UP:]


def _timed(step: Callable[[], None], world: mesh.World) -> float:
    """Seconds from when all begin to when all have ended."""
    world.barrier()
    start_s = time.perf_counter()
    step()
    world.barrier()
    return time.perf_counter() - start_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--orders", nargs="+", choices=tuple(SCHEDULES), default=tuple(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sleep-ms", type=float, default=20.0)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.microbatches} microbatches, medians in ms")
    print("order         processes     clock      ours      peer   ratio (least to most)")
    with Launcher((*PRELOAD, "torch.distributed.pipelining")) as launcher:
        for n_processes in options.processes:
            for order in options.orders:
                setting = Setting(
                    order=order,
                    n_processes=n_processes,
                    n_microbatches=options.microbatches,
                    n_rounds=options.rounds,
                    sleep_s=options.sleep_ms / 1e3,
                )
                print(f"{order:13} {n_processes:9} {_row(setting, launcher)}", flush=True)


def _row(setting: Setting, launcher: Launcher) -> str:
    refused = ORDERS[setting.order].refused(setting.n_processes, setting.n_microbatches)
    if refused is not None:
        return f"  none: {refused}"
    ours_s, theirs_s = launcher.run(compare, (setting,), n_processes=setting.n_processes)[0]
    ratios = [ours / theirs for ours, theirs in zip(ours_s, theirs_s, strict=True)]
    seconds = (setting.clock_s(), statistics.median(ours_s), statistics.median(theirs_s))
    shown = " ".join(f"{1e3 * each:9.1f}" for each in seconds)
    return f"{shown} {statistics.median(ratios):7.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
