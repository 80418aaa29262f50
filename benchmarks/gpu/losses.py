"""Where the time of a step goes: kernels of the chosen plan, and when none runs.

    python benchmarks/gpu/losses.py [--model llama-1.3b] [--compiled] [--devices N] [--bare]

One step is recorded by torch's profiler, on the first device, after those that warm up. Shares are
of the time from one step's end to the next. With `--bare` a loop by hand stands beside it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import bare
import torch
from stand import WARM, Setting, Stand, plans, setting, timed_here, where

from polyreme.cluster import accelerator as accelerators
from polyreme.plan.describe import describe
from polyreme.plan.options import Parallel
from polyreme.runtime.kernels import Kernel, Recorder
from polyreme.runtime.timing import union_s

if TYPE_CHECKING:
    from polyreme.plan.ir import Plan

KINDS = (  # of kernels, by what is in their names; the first that fits
    ("collectives", ("nccl",)),
    ("attention", ("flash", "attention", "fmha", "cudnn_generated")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "cublas")),
    ("optimizer", ("adam", "multi_tensor")),
    ("loss", ("softmax", "nll", "log_softmax")),
    ("copies", ("memcpy", "copy", "memset", "fill")),
    ("sums", ("reduce", "norm")),
)


def kind_of(name: str) -> str:
    """What a kernel is for, by its name.

    >>> kind_of("void at::native::vectorized_elementwise_kernel")
    'other'
    """
    low = name.lower()
    return next((kind for kind, words in KINDS if any(w in low for w in words)), "other")


class Recorded:
    """A step's kernels by name (seconds, calls), and its length."""

    def __init__(self, kernels: list[Kernel], step_s: float) -> None:
        self.step_s = step_s
        self.busy_s = union_s((start, end) for _, start, end in kernels)
        self.gaps = _gaps(kernels)
        self.taken_s: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        for name, start, end in kernels:
            self.taken_s[name] += end - start  # type: ignore[assignment]
            self.calls[name] += 1

    def said(self, most: int) -> list[str]:
        """The longest times without a kernel, with those before and after."""
        return [
            f"{1e3 * gap_s:.2f} ms between `{before[:50]}` and `{after[:50]}`"
            for gap_s, before, after in self.gaps[:most]
        ]

    def rows(self, most: int) -> list[str]:
        """By kind, then the longest kernels."""
        kinds: Counter[str] = Counter()
        for name, taken_s in self.taken_s.items():
            kinds[kind_of(name)] += taken_s  # type: ignore[assignment]
        found = [f"| {kind} | | {self._share(own_s)} |" for kind, own_s in kinds.most_common()]
        found.append(f"| no kernel runs | | {self._share(self.step_s - self.busy_s)} |")
        return found + [
            f"| {kind_of(name)} | `{name[:90]}` x {self.calls[name]} | {self._share(own_s)} |"
            for name, own_s in self.taken_s.most_common(most)
        ]

    def _share(self, own_s: float) -> str:
        return f"{1e3 * own_s:.1f} ms | {100 * own_s / self.step_s:.1f} %"


def _gaps(kernels: list[Kernel]) -> list[tuple[float, str, str]]:
    """Longest first; the names of kernels before and after."""
    found, last, reach = [], "the end of the step before", float("nan")
    for name, start, end in sorted(kernels, key=lambda each: each.start_s):
        if start > reach:
            found.append((start - reach, last, name))
        if not end <= reach:
            last, reach = name, end
    return sorted(found, reverse=True)


class _Recorder:
    """Records one step, from the end of the one before it."""

    def __init__(self) -> None:
        self._n, self._begun_s = 0, 0.0
        self._recorder = Recorder(accelerators.detect())
        self.found: Recorded | None = None

    def __call__(self, **_: Any) -> None:
        """At the end of each step."""
        self._n += 1
        if self._n == WARM + 2:
            self._recorder.start()
            self._begun_s = time.perf_counter()
        elif self._n == WARM + 3:
            torch.accelerator.synchronize()
            step_s = time.perf_counter() - self._begun_s
            self.found = Recorded(self._recorder.stop(), step_s)


def _recorded(asked: Setting, plan: Plan) -> Recorded | None:
    recorder = _Recorder()
    timed_here(asked, plan, WARM + 3, recorder)
    return recorder.found


def _recorded_bare(asked: Setting, microbatch: int) -> Recorded | None:
    recorder = _Recorder()
    bare.loop(asked, "fsdp2", microbatch, False, WARM + 3, recorder)
    return recorder.found


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--bare", type=int, help="microbatch of a loop by hand beside it")
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--most", type=int, default=12, help="kernels that are listed")
    given = parser.parse_args()
    if not torch.accelerator.is_available():
        raise SystemExit("there is no accelerator here")
    print(where())
    with Stand() as stand:
        for name in given.model or ("llama-1.3b", "llama-7b"):
            asked = setting(name, given.devices, compiled=given.compiled)
            profile, _ = stand.profile(asked)
            plan = plans(asked, profile, Parallel(microbatch=given.microbatch))[0]
            both = [(describe(plan), stand.launch(_recorded, asked, (plan,))[0])]
            if given.bare:
                found = stand.launch(_recorded_bare, asked, (given.bare,))[0]
                both.append((f"fsdp2 by hand, microbatch {given.bare}", found))
            for what, recorded in both:
                assert recorded is not None
                print(f"\n{name}, {what}: {1e3 * recorded.step_s:.1f} ms\n")
                print("| kind | kernel | time | share |\n|---|---|---|---|")
                print("\n".join(recorded.rows(given.most)))
                print("\nLongest without a kernel:", *recorded.said(6), sep="\n* ", flush=True)


if __name__ == "__main__":
    main()
