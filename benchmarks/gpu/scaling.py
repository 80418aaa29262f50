"""Fixed work per device on 1, 2, 4, 8 of the devices: tokens a second, W and its factors.

    python benchmarks/gpu/scaling.py [--model llama-1.3b] [--devices 1 2 4 8] [--steps 40]
                                     [--compiled]

Each number of devices has its own profile and the plan that is chosen for it. W and its factors are
those of the summary of the run, which begins with the making of the model; with no reference, the
effectiveness is assumed to be 1.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stand import MODELS, RULE, Noise, Setting, Stand, Timed, head, plans, setting

from polyreme import summary
from polyreme.algo.compose import DataParallel
from polyreme.algo.train import Train
from polyreme.cluster import accelerator as accelerators
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.describe import describe
from polyreme.plan.ir import Plan
from polyreme.plan.options import Parallel
from polyreme.profile.record import Profile
from polyreme.runlog import Summary, Writer, read
from polyreme.runtime import loop, mesh
from polyreme.runtime.job import Job


@dataclass(frozen=True, kw_only=True)
class Summed(Timed):
    """With the summary of the run, on the first process."""

    summary: Summary | None = None


def trained(asked: Setting, plan: Plan, profile: Profile, steps: int) -> Summed:
    """A run on this process, and what it came to."""
    world = mesh.open(accelerators.detect())
    graph = asked.model.graph()
    job = Job(
        graph=graph,
        plan=plan,
        source=Noise(asked.model.sample),
        train=Train(steps=steps, global_batch=asked.global_batch, compile=asked.compiled),
        algorithm=DataParallel(rule=RULE),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        log = Writer(path) if world.is_first else None
        outcome = loop.train(job, world, log=log)
        mesh.close(world)
        if log is None:
            return Summed(peak_bytes=outcome.peak_bytes)
        log.close()
        known = summary.Setting(graph=graph, plan=plan, cluster=asked.cluster, profile=profile)
        found = summary.summarise(read(path), known, status=outcome.status)
    return Summed(step_s=found.step_s_median or 0.0, peak_bytes=outcome.peak_bytes, summary=found)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-1.3b")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    there = accelerators.detect().count()
    print(head())
    print(f"{given.model}, {MODELS[given.model].batch} samples a device, {given.steps} steps\n")
    print(
        "| devices | plan | ms | tokens/s | a device's, of one alone | W | utilisation "
        "| effectiveness | goodput | basis |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    alone: float | None = None
    left = [n for n in given.devices if n > there]
    with Stand() as stand:
        for n in sorted(set(given.devices) - set(left)):
            asked = setting(given.model, n, compiled=given.compiled)
            profile, _ = stand.profile(asked)
            try:
                plan = plans(asked, profile, Parallel())[0]
            except (ConfigError, Infeasible) as error:
                print(f"| {n} | {str(error).splitlines()[0]} {'| - ' * 8}|", flush=True)
                continue
            found = stand.run(trained, asked, (plan, profile, given.steps))
            rate = asked.global_batch * (asked.model.seq_len or 1) / found.step_s
            if n == 1 and found.ran:
                alone = rate
            print(f"| {n} | {describe(plan)} | {row(found, rate, rate / n, alone)} |", flush=True)
    if left:
        print(
            f"\nnot on {', '.join(map(str, left))}: there {'is' if there == 1 else 'are'} {there}"
        )


def row(found: Timed, rate: float, each: float, alone: float | None) -> str:
    """The cells of one number of devices."""
    if not isinstance(found, Summed) or found.summary is None:
        return f"{found.why} {'| - ' * 7}"
    whole = found.summary
    parts = [whole.w, whole.utilisation, whole.effectiveness, whole.goodput]
    cells = ["-" if part is None else f"{part:.3f}" for part in parts]
    beside = "-" if alone is None else f"{100 * each / alone:.1f} %"
    return (
        f"{1e3 * found.step_s:.1f} | {rate:,.0f} | {beside} | {' | '.join(cells)} | "
        f"{', '.join(whole.basis[name] for name in ('utilisation', 'effectiveness', 'goodput'))}"
    )


if __name__ == "__main__":
    main()
