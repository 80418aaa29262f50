"""The plan that is chosen, against every plan by hand and against loops by hand, in one call.

    python benchmarks/gpu/best.py [--model llama-1.3b] [--bare] [--devices N]

By hand: microbatches by powers of two, with and without recomputation, and on several devices
tensor parts, pipelines and levels, one strategy for all layers. Llamas stand beside `bare`'s loops
with `--bare`. Compiled and not.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import Any

import bare
from stand import Setting, Stand, Timed, plans, setting, where

from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.describe import describe
from polyreme.plan.options import Parallel

NAMES = ("llama-1.3b", "llama-7b", "bert-huge", "vit-huge", "t5-large", "swin-huge")


def by_hand(asked: Setting) -> Iterator[Parallel]:
    """Every split of one strategy for all layers that the devices allow by their number."""
    n = asked.n_devices
    powers = [2**k for k in range(n.bit_length()) if n % 2**k == 0]
    for pp, tp in itertools.product(powers, powers):
        if n % (pp * tp):
            continue
        shard = n // (pp * tp)
        levels = ("none",) if shard == 1 else ("none", "optimizer", "params")
        share = asked.global_batch // shard
        for level, k, recompute in itertools.product(
            levels, range(share.bit_length()), ("none", "all")
        ):
            more: dict[str, Any] = {"sp": True} if tp > 1 else {}
            if shard > 1:
                more["level"] = level
            if share % 2**k == 0:
                yield Parallel(
                    pp=pp,
                    tp=tp,
                    replica=1,
                    shard=shard,
                    microbatch=2**k,
                    recompute=recompute,
                    **more,
                )


def measured(stand: Stand, asked: Setting, of_bare: bool) -> Iterator[tuple[str, Timed]]:
    """What was run, and how it did: the plan that is chosen, those by hand, loops by hand."""
    profile, _ = stand.profile(asked)
    chosen = plans(asked, profile, Parallel())[0]
    yield f"auto: {describe(chosen)}", stand.timed(asked, chosen)
    seen = {describe(chosen)}
    for parallel in by_hand(asked):
        try:
            plan = plans(asked, profile, parallel)[0]
        except (Infeasible, ConfigError):
            continue
        if describe(plan) not in seen:
            seen.add(describe(plan))
            yield f"grid: {describe(plan)}", stand.timed(asked, plan)
    if not of_bare:
        return
    share = asked.global_batch // asked.n_devices
    for kind, k, recompute in itertools.product(
        ("fsdp2", "ddp"), range(share.bit_length()), (False, True)
    ):
        if share % 2**k == 0:
            found = bare.timed(stand, asked, kind=kind, microbatch=2**k, recompute=recompute)
            again = ", recompute" if recompute else ""
            yield f"bare: {kind}, microbatch {2**k}{again}", found


def main() -> None:
    """Print a table for each model, compiled and not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--bare", action="store_true", help="beside loops by hand")
    parser.add_argument("--compiled", choices=("no", "yes", "both"), default="both")
    given = parser.parse_args()
    print(where())
    print("| model | compiled | what | ms | tokens/s | of peak | GiB |")
    print("|---|---|---|---|---|---|---|")
    kinds = {"no": (False,), "yes": (True,), "both": (False, True)}[given.compiled]
    ends: list[str] = []
    with Stand() as stand:
        for name, compiled in itertools.product(given.model or NAMES, kinds):
            asked = setting(name, given.devices, compiled=compiled)
            best: dict[str, float] = {}
            for what, found in measured(stand, asked, given.bare):
                row = bare.cells(asked, found)
                print(f"| {name} | {'yes' if compiled else 'no'} | {what} | {row} |", flush=True)
                kind = what.partition(":")[0]
                if found.ran:
                    best[kind] = min(found.step_s, best.get(kind, found.step_s))
            auto_s = best.pop("auto", float("nan"))
            ends += [
                f"{name}, {'' if compiled else 'not '}compiled: auto runs at {step_s / auto_s:.3f} "
                f"of the speed of the best of {kind}."
                for kind, step_s in best.items()
            ]
    print("\n".join(ends))


if __name__ == "__main__":
    main()
