"""Two hosts in one: the plan that is chosen against FSDP2 over all devices, at an equal batch.

    python benchmarks/gpu/hosts.py [--model llama-1.3b] [--batch 64] [--devices N] [--compiled]

The devices of this host are made into two (`pretended`), between which there is a loopback socket
alone. The plan is made from a profile that was measured there. FSDP2 is `bare`'s loop, with the
microbatch and recomputation that are its best. The goal is a quarter of its seconds on 2 devices,
a third on 4.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

import bare
from stand import MODELS, Setting, Stand, Timed, head, plans, setting, too_few

from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.describe import describe
from polyreme.plan.options import Parallel

N_HOSTS = 2
GOALS = {2: 4.0, 4: 3.0}  # times as fast, by devices


def chosen(stand: Stand, asked: Setting) -> tuple[str, Timed]:
    """What the planner chooses for two hosts, in words, and how it did."""
    profile, _ = stand.profile(asked)
    try:
        plan = plans(asked, profile, Parallel())[0]
    except (ConfigError, Infeasible) as error:
        return "none", Timed(why=str(error).splitlines()[0])
    return describe(plan), stand.timed(asked, plan)


def peers(stand: Stand, asked: Setting) -> Iterator[tuple[str, Timed]]:
    """FSDP2 in every microbatch that divides the batch, the largest first."""
    share = asked.global_batch // asked.n_devices
    sizes = [2**k for k in reversed(range(share.bit_length())) if share % 2**k == 0]
    for microbatch, recompute in itertools.product(sizes, (False, True)):
        words = f"microbatch {microbatch}{', recompute' if recompute else ''}"
        yield (
            words,
            bare.timed(stand, asked, kind="fsdp2", microbatch=microbatch, recompute=recompute),
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="llama-1.3b")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--devices", type=int)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    asked = setting(given.model, given.devices, compiled=given.compiled)
    n = asked.n_devices
    print(head())
    odd = f"{n} devices do not make {N_HOSTS} hosts" if n % N_HOSTS else None
    if why := too_few(n, N_HOSTS) or odd:
        print(why)
        return
    asked = replace(asked, n_hosts=N_HOSTS, global_batch=given.batch)
    print(f"{given.model}, {given.batch} samples a step, {N_HOSTS} hosts of {n // N_HOSTS}")
    print("\n| | plan | s/step | GiB |\n|---|---|---|---|")
    with Stand() as stand:
        words, ours = chosen(stand, asked)
        print(row("auto", words, ours), flush=True)
        theirs = []
        for words, found in peers(stand, asked):
            print(row("FSDP2", words, found), flush=True)
            theirs += [found.step_s] if found.ran else []
    if not (ours.ran and theirs):
        print("\nno ratio: one of the two did not run")
        return
    goal = f" (goal: {GOALS[n]:g})" if n in GOALS else ""
    print(f"\nratio of the best FSDP2 to auto: {min(theirs) / ours.step_s:.2f}{goal}")


def row(who: str, words: str, found: Timed) -> str:
    """One line of the table."""
    if not found.ran:
        return f"| {who} | {words} | {found.why} | - |"
    return f"| {who} | {words} | {found.step_s:.4f} | {found.peak_bytes / 2**30:.1f} |"


if __name__ == "__main__":
    main()
