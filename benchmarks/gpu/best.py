"""The plan that is chosen, against every plan by hand and against loops by hand, in one call.

    python benchmarks/gpu/best.py [--model llama-1.3b] [--bare 4] [--devices N]

By hand: microbatches by powers of two, with and without recomputation, and on several devices
tensor parts, pipelines and levels, one strategy for all layers. Llamas stand beside `bare`'s loops
with `--bare`. Compiled and not.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import bare
from stand import Setting, Stand, Timed, plans, setting, where

from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.describe import describe
from polyreme.plan.options import Parallel

if TYPE_CHECKING:
    from polyreme.plan.ir import Plan
    from polyreme.profile.record import Profile

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


def tried(asked: Setting, profile: Profile) -> list[tuple[str, Plan]]:
    """The plan that is chosen, and those by hand that fit and are others."""
    chosen = plans(asked, profile, Parallel())[0]
    found = {describe(chosen): ("auto", chosen)}
    for parallel in by_hand(asked):
        try:
            plan = plans(asked, profile, parallel)[0]
        except (Infeasible, ConfigError):
            continue
        found.setdefault(describe(plan), ("grid", plan))
    return [*found.values()]


def loops(asked: Setting, least: int) -> list[tuple[bare.Kind, int, bool]]:
    """Loops by hand with microbatches from `least` on; they recompute only where that is asked."""
    share = asked.global_batch // asked.n_devices
    sizes = [2**k for k in range(share.bit_length()) if share % 2**k == 0 and 2**k >= least]
    return [(kind, size, False) for kind in bare.KINDS for size in sizes]


def measured(
    stand: Stand, asked: Setting, of_bare: Sequence[tuple[bare.Kind, int, bool]]
) -> Iterator[tuple[str, str, Timed]]:
    """What was run: of what kind, in words, and how it did."""
    profile, _ = stand.profile(asked)
    ours = tried(asked, profile)
    ends = stand.timed_all(asked, [plan for _, plan in ours])
    for (kind, plan), found in zip(ours, ends, strict=True):
        assert plan.estimate is not None
        step_s, n_bytes = plan.estimate.step_s, sum(plan.estimate.peak_bytes.values())
        predicted = f" | {1e3 * step_s:.1f} | {n_bytes / 2**30:.1f}"
        yield kind, describe(plan) + predicted, found
    for each, found in zip(of_bare, bare.timed_all(stand, asked, of_bare), strict=True):
        yield "by hand", f"{each[0]}, microbatch {each[1]} | - | -", found


def main() -> None:
    """Print a table for each model, compiled and not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--bare", type=int, help="beside loops by hand of such microbatches up")
    parser.add_argument("--compiled", choices=("no", "yes", "both"), default="both")
    given = parser.parse_args()
    print(where())
    print("| model | compiled | what | predicted ms | GiB | ms | tokens/s | of peak | GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    kinds = {"no": (False,), "yes": (True,), "both": (False, True)}[given.compiled]
    ends: list[str] = []
    with Stand() as stand:
        for name, compiled in itertools.product(given.model or NAMES, kinds):
            asked = setting(name, given.devices, compiled=compiled)
            best: dict[str, float] = {}
            of_bare = loops(asked, given.bare) if given.bare else []
            for kind, what, found in measured(stand, asked, of_bare):
                row = f"{kind}: {what} | {bare.cells(asked, found)}"
                print(f"| {name} | {'yes' if compiled else 'no'} | {row} |", flush=True)
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
