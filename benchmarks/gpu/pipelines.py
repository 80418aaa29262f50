"""Orders of a pipeline over all devices: seconds, bubbles measured and played, torch's runtime.

    python benchmarks/gpu/pipelines.py [--model llama-1.3b] [--orders 1f1b zb-v ...]
                                       [--microbatches 8 16 32] [--rows 1] [--devices N]

A bubble is the share of a step in which a device runs no kernel but those of communication, the
mean over devices. What is measured is of one profiled step (on processors: of time not spent
waiting for others); what is played has the times of the profile and of the update. The peer is
torch.distributed.pipelining on the same stages, where it has the order; its weights and optimizer
states are bf16 alone, ours have fp32 masters. The goals: bubbles within 5 points, and zb-v faster
than 1f1b.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from stand import MODELS, RULE, Noise, Setting, Stand, Timed, head, plans, setting, too_few

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from peer import SCHEDULES, peer
from polyreme.algo.compose import DataParallel
from polyreme.algo.train import Train
from polyreme.cluster import accelerator as accelerators
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.plan.order import ORDERS
from polyreme.plan.play import play
from polyreme.profile.record import Profile
from polyreme.runtime import loop, mesh
from polyreme.runtime.device_time import FIRST
from polyreme.runtime.job import Job

NAMES = ("1f1b", "interleaved", "zb-h1", "zb-v", "chimera", "dualpipe")
POINTS = 5.0
STEPS, TAKEN = FIRST + 7, 6  # the shares that a device says are of a step before these


@dataclass(frozen=True, kw_only=True)
class Pipelined(Timed):
    """With the share of a step in which a device does nothing."""

    bubble: float = math.nan


def ours(asked: Setting, plan: Plan) -> Pipelined:
    """A run of ours on this process."""
    world = mesh.open(accelerators.detect())
    outcome = loop.train(_job(asked, plan), world)
    last = [*zip(outcome.compute_s, outcome.step_s, strict=True)][-TAKEN:]
    idle = statistics.median(1 - compute_s / step_s for compute_s, step_s in last)
    bubble = statistics.mean(world.gather(idle))
    mesh.close(world)
    return Pipelined(
        step_s=statistics.median(step_s for _, step_s in last),
        bubble=bubble,
        peak_bytes=outcome.peak_bytes,
    )


def theirs(asked: Setting, plan: Plan) -> Timed:
    """Steps of torch's runtime on the stages of the plan, on this process."""
    world = mesh.open(accelerators.detect())
    job = _job(asked, plan)
    rows = torch.arange(asked.global_batch).numpy()
    fields = {name: x.to(world.device) for name, x in job.source.train(rows).items()}
    steps_s = []
    found = peer(job, world, plan.order_name)
    optimizer = torch.optim.AdamW(found.parameters.values(), lr=RULE.lr, fused=True)
    for _ in range(STEPS):
        world.accelerator.synchronize()
        world.barrier()
        start_s = time.perf_counter()
        found.step(fields["input_ids"], fields["labels"])
        optimizer.step()
        optimizer.zero_grad()
        world.accelerator.synchronize()
        world.barrier()
        steps_s.append(time.perf_counter() - start_s)
    peak_bytes = world.accelerator.peak_bytes()
    mesh.close(world)
    return Timed(step_s=statistics.median(steps_s[-TAKEN:]), peak_bytes=peak_bytes)


def _job(asked: Setting, plan: Plan) -> Job:
    return Job(
        graph=asked.model.graph(),
        plan=plan,
        source=Noise(asked.model.sample),
        train=Train(steps=STEPS, global_batch=asked.global_batch),
        algorithm=DataParallel(rule=RULE),
    )


def planned(asked: Setting, profile: Profile, order: str, rows: int) -> Plan | str:
    """A pipeline over all devices in that order, or why there is none."""
    n = asked.n_devices
    split = Parallel(pp=n, tp=1, shard=1, replica=1, order=order, microbatch=rows, recompute="none")
    refused = ORDERS[order].refused(n, asked.global_batch // rows)
    if refused is not None:
        return refused
    try:
        return plans(asked, profile, split)[0]
    except (ConfigError, Infeasible) as error:
        return str(error).splitlines()[0]


def played(plan: Plan) -> float:
    """The share of the predicted step in which a device neither passes nor updates."""
    estimate = plan.estimate
    assert estimate is not None, "the planner wrote it"
    assert estimate.stages is not None, "there are several"
    found = play(plan.order, len(plan.stages), estimate.stages)
    ranks = range(len(plan.order))
    busy_s = found.makespan_s - statistics.mean(found.bubble_s(rank) for rank in ranks)
    return 1 - (busy_s + estimate.update_s) / estimate.step_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-1.3b")
    parser.add_argument("--orders", nargs="+", choices=tuple(ORDERS), default=NAMES)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--rows", type=int, default=1, help="samples of a microbatch")
    parser.add_argument("--devices", type=int)
    given = parser.parse_args()
    asked = setting(given.model, given.devices)
    print(head())
    if why := too_few(asked.n_devices):
        print(why)
        return
    print(f"{given.model} on {asked.n_devices}, {given.rows} samples a microbatch\n")
    print(
        "| microbatches | order | stages | ms | bubble | played | points | GiB | peer ms | times |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    seconds: dict[tuple[int, str], float] = {}
    with Stand() as stand:
        most = replace(asked, global_batch=max(given.microbatches) * given.rows)
        profile, _ = stand.profile(most)
        for n, order in itertools.product(given.microbatches, given.orders):
            each = replace(asked, global_batch=n * given.rows)
            plan = planned(each, profile, order, given.rows)
            if isinstance(plan, str):
                print(f"| {n} | {order} | {plan} {'| - ' * 7}|", flush=True)
                continue
            found = stand.run(ours, each, (plan,))
            other = stand.run(theirs, each, (plan,)) if order in SCHEDULES else Timed(why="none")
            print(f"| {n} | {order} | {len(plan.stages)} | {row(found, other, played(plan))} |")
            sys.stdout.flush()
            seconds[n, order] = found.step_s
    for n in given.microbatches:
        ratio = seconds.get((n, "1f1b"), math.nan) / seconds.get((n, "zb-v"), math.nan)
        if not math.isnan(ratio):
            print(f"\n{n} microbatches: 1f1b takes {ratio:.3f} times as long as zb-v")


def row(found: Timed, other: Timed, share: float) -> str:
    """The cells of a run of ours beside the peer's and what was played."""
    if not isinstance(found, Pipelined) or not found.ran:
        return f"{found.why} {'| - ' * 6}"
    points = 100 * (found.bubble - share)
    mark = "" if abs(points) <= POINTS else " (!)"
    theirs_s = f"{1e3 * other.step_s:.1f}" if other.ran else other.why
    times = f"{other.step_s / found.step_s:.3f}" if other.ran else "-"
    return (
        f"{1e3 * found.step_s:.1f} | {100 * found.bubble:.1f} % | {100 * share:.1f} % | "
        f"{points:+.1f}{mark} | {found.peak_bytes / 2**30:.1f} | {theirs_s} | {times}"
    )


if __name__ == "__main__":
    main()
