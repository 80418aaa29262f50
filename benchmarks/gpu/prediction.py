"""Predicted against measured: seconds of a step and peak bytes, of plans that differ.

    python benchmarks/gpu/prediction.py [--model llama-1.3b] [--compiled] [--devices N]

For each model a profile is measured, then a number of plans is priced and run. What is measured is
the median of some steps, with the fastest and the slowest of them. Bytes are those of tensors and
what a process holds beside them: contexts and workspaces of libraries.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from stand import Setting, Stand, Timed, plans, setting, where

from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.describe import describe
from polyreme.plan.options import Parallel

if TYPE_CHECKING:
    from polyreme.plan.ir import Plan
    from polyreme.profile.record import Profile

NAMES = ("llama-1.3b", "llama-7b", "bert-huge", "vit-huge", "t5-large", "swin-huge")
PER_MODEL = 4


class Row(NamedTuple):
    """A plan's prediction beside what was measured."""

    name: str
    plan: Plan
    found: Timed

    @property
    def step_s(self) -> float:
        """Predicted."""
        assert self.plan.estimate is not None
        return self.plan.estimate.step_s

    @property
    def n_bytes(self) -> int:
        """Predicted."""
        assert self.plan.estimate is not None
        return sum(self.plan.estimate.peak_bytes.values())

    @property
    def time_error(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.step_s / self.found.step_s - 1

    @property
    def memory_error(self) -> float:
        """The same of bytes."""
        return self.n_bytes / self.found.peak_bytes - 1


def splits(asked: Setting) -> Iterator[Parallel]:
    """Ways to split, those that differ most first: axes, then level, then what a pass holds."""
    n, share = asked.n_devices, asked.global_batch // asked.n_devices
    halves = [share, max(1, share // 4), max(1, share // 2), 1]
    grids: list[dict[str, int | str | bool]] = [{"pp": 1, "tp": 1, "replica": 1, "shard": n}]
    if n > 1:
        grids = [
            {**grids[0], "level": "params"},
            {"pp": 1, "tp": n, "sp": True, "replica": 1, "shard": 1},
            {"pp": n, "tp": 1, "replica": 1, "shard": 1, "order": "1f1b"},
            {**grids[0], "level": "optimizer"},
        ]
        if n > 3:
            grids.insert(0, {"pp": 2, "tp": 2, "replica": 1, "shard": n // 4, "level": "grads"})
    for microbatch, recompute in itertools.product(halves, ("none", "all")):
        for grid in grids:
            yield Parallel(**grid, microbatch=microbatch, recompute=recompute)  # type: ignore[arg-type]


def drawn(asked: Setting, profile: Profile) -> list[Plan]:
    """Up to PER_MODEL plans of `splits` that fit, as the planner prices them."""
    found: dict[str, Plan] = {}
    for parallel in splits(asked):
        try:
            plan = plans(asked, profile, parallel)[0]
        except (Infeasible, ConfigError):
            continue
        found.setdefault(describe(plan), plan)
        if len(found) == PER_MODEL:
            break
    return [*found.values()]


def cells(row: Row) -> str:
    """A line of the table."""
    if not row.found.ran:
        return f"| {row.name} | {describe(row.plan)} | {row.found.why} | - | - | - | - | - |"
    least_ms, most_ms = (1e3 * each_s for each_s in row.found.range_s)
    return (
        f"| {row.name} | {describe(row.plan)} | {1e3 * row.step_s:.1f} | "
        f"{1e3 * row.found.step_s:.1f} ({least_ms:.0f} to {most_ms:.0f}) | "
        f"{100 * row.time_error:+.1f} % | "
        f"{row.n_bytes / 2**30:.2f} | {row.found.peak_bytes / 2**30:.2f} | "
        f"{100 * row.memory_error:+.1f} % |"
    )


def said(rows: list[Row]) -> Iterator[str]:
    """Errors over all rows, and how the plan called best of each model did."""
    ran = [row for row in rows if row.found.ran]
    errors = [abs(row.time_error) for row in ran]
    memory = [row.memory_error for row in ran]
    yield f"{len(ran)} of {len(rows)} plans ran."
    if not ran:
        return
    yield (
        f"Seconds: mean error {100 * math.fsum(errors) / len(errors):.2f} % (goal: below 3.59), "
        f"worst {100 * max(errors):.1f} % (10)."
    )
    yield (
        f"Bytes: worst {100 * max(map(abs, memory)):.1f} % (5), "
        f"lowest {100 * min(memory):+.1f} % (-2)."
    )
    for name in dict.fromkeys(row.name for row in ran):
        own = [row for row in ran if row.name == name]
        called = min(own, key=lambda row: row.step_s).found.step_s
        best = min(row.found.step_s for row in own)
        yield f"{name}: the plan called best takes {called / best:.3f} of the measured best (1.03)."


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    rows: list[Row] = []
    print(where())
    print("| model | plan | predicted ms | measured ms | error | GiB | measured GiB | error |")
    print("|---|---|---|---|---|---|---|---|")
    with Stand() as stand:
        for name in given.model or NAMES:
            asked = setting(name, given.devices, compiled=given.compiled)
            profile, took_s = stand.profile(asked)
            tried = drawn(asked, profile)
            for plan, found in zip(tried, stand.timed_all(asked, tried), strict=True):
                rows.append(Row(name, plan, found))
                print(cells(rows[-1]), flush=True)
            print(f"<!-- {name}: profile in {took_s:.0f} s -->", flush=True)
    print("\n".join(said(rows)))


if __name__ == "__main__":
    main()
