"""Compressors and aggregators on a device, in times of one copy of their input on it.

python benchmarks/gpu/kernels.py [--numbers 4194304 67108864] [--only Sign TopK]

A compressor's time is that to encode and decode float32 numbers drawn normal, with its own draws;
one that exchanges in rounds does so alone (a worker of one, what was sent of its own included).
An aggregator is given 16 rows of so many numbers, and the copy is of all of them. Member and copy
take turns in one run, each on another input every time, so that none is found in a cache; times
are of the device's own clock, the median of `runs` after warm-ups. `kernels` are what one call
starts on the device, copies among them, and `busy` the milliseconds that these take: what is left
of `ms` is the host's. Members that do not keep to their bound are taken apart below.
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from stand import where

from polyreme.algo import aggregate, compress
from polyreme.algo.aggregate import Aggregator
from polyreme.algo.compress import Compressor
from polyreme.algo.compress.kind import CompressorKind
from polyreme.algo.effects import alone, settled
from polyreme.algo.packet import Like
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.cluster import accelerator as accelerators
from polyreme.runtime.kernels import Recorder

SIZES = (2**22, 2**26)
ROWS, HOSTILE = 16, 3
RUNS, BUDGET_S = 10, 4.0
BOUND, BOUND_BY_RANK = 4.0, 8.0
UNBOUND = ("AdaComp", "ATOMO", "CountSketch")
SLOW_S = 0.2  # what has no bound and takes as long is not tried on more numbers
_ROOM = 2**29  # bytes of inputs together: no cache holds them
_SHORT_S = 2e-3  # calls shorter than that are timed several at a time, as they come in training
_AT_ONCE = 8
_NAMED = 4

Call = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Member:
    """A compressor or aggregator, what it is called here, and at most how many copies it takes."""

    name: str
    kind: Any
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table; `why` says why there are no times."""

    member: Member
    numbers: int
    ms: float = math.nan
    copies: float = math.nan
    runs: int = 0
    kernels: int | None = None
    busy_ms: float = math.nan
    slowest: tuple[tuple[str, int, float], ...] = ()
    why: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether it keeps to its bound; None: has none, or was not timed."""
        return None if self.member.bound is None or self.why else self.copies <= self.member.bound

    @property
    def cells(self) -> list[str]:
        """As they are printed."""
        size, bound = f"2^{math.log2(self.numbers):g}", self.member.bound
        wanted = "-" if bound is None else f"{bound:g}"
        if self.why:
            return [self.member.name, size, "-", "-", wanted, self.why, "-", "-", "-"]
        holds = {None: "-", True: "yes", False: "no"}[self.holds]
        seen = ["-", "-"] if self.kernels is None else [str(self.kernels), f"{self.busy_ms:.3f}"]
        times = [f"{self.ms:.3f}", f"{self.copies:.2f}"]
        return [self.member.name, size, *times, wanted, holds, str(self.runs), *seen]


HEAD = ("member", "size", "ms", "copies", "bound", "holds", "runs", "kernels", "busy")


def compressors() -> list[Member]:
    """All of the union, by their defaults; with a share of the entries that is 1 % where one is."""
    more: dict[type, list[tuple[str, CompressorKind]]] = {
        compress.Sign: [
            ("Sign", compress.Sign()),
            ("Sign, mean", compress.Sign(scale="mean")),
        ],
        compress.TopK: [
            ("TopK", compress.TopK()),
            ("TopK, sampled", compress.TopK(select="sampled")),
        ],
        # Of normal numbers that is one in a hundred.
        compress.Threshold: [("Threshold", compress.Threshold(threshold=2.5758))],
        compress.PowerSGD: [("PowerSGD, rank 4", compress.PowerSGD(rank=4))],
    }
    found = []
    for kind in get_args(Compressor):
        for name, member in more.get(kind, [(kind.__name__, kind())]):
            bound = BOUND_BY_RANK if kind is compress.PowerSGD else BOUND
            bounded = kind.__name__ not in UNBOUND
            found.append(Member(name=name, kind=member, bound=bound if bounded else None))
    return found


def aggregators() -> list[Member]:
    """All of the union, with as many hostile rows as all of them bear."""
    robust = {"byzantine": HOSTILE}
    given = {kind: {} if kind is aggregate.Mean else robust for kind in get_args(Aggregator)}
    return [Member(name=kind.__name__, kind=kind(**more)) for kind, more in given.items()]


def coding(kind: CompressorKind, inputs: Sequence[torch.Tensor]) -> Call:
    """Encodes and decodes the inputs, one a call; the state goes on from call to call."""
    like = Like.of(inputs[0])
    state = kind.init(like)
    me = Worker(rank=0, n=1, layout=Layout.of({"x": like.shape}), seed=0, lr=lambda _: 0.1)

    def whole(xs: Sequence[torch.Tensor]) -> Iterator[Any]:
        return list(xs)
        yield

    def call(number: int) -> Any:
        nonlocal state
        x, draw = inputs[number % len(inputs)], me.draw(number)
        if kind.in_rounds:
            outs, _, (state,) = alone(kind.exchange([x], [state], [draw], whole, me))
            return outs[0]
        buffers, state = kind.encode(x, state, draw)
        return kind.decode(buffers, like)

    return call


def aggregating(kind: Any, inputs: Sequence[torch.Tensor]) -> Call:
    """Aggregates the inputs' rows, one input a call."""
    state = kind.init(inputs[0][0])

    def call(number: int) -> Any:
        nonlocal state
        out, state, _ = alone(settled(kind.combine(inputs[number % len(inputs)], state)))
        return out

    return call


class Bench:
    """Times calls on a device against copies of their inputs."""

    def __init__(self, accelerator: accelerators.Accelerator) -> None:
        self._on = accelerator
        self._device = accelerator.device(0)
        self._called = 0

    def inputs(self, *shape: int) -> list[torch.Tensor]:
        """So many that no cache holds them, and at least three."""
        draw = torch.Generator(self._device).manual_seed(0)
        n = max(3, min(32, _ROOM // (4 * math.prod(shape))))
        return [torch.randn(shape, generator=draw, device=self._device) for _ in range(n)]

    def row(self, member: Member, call: Call, inputs: Sequence[torch.Tensor], numbers: int) -> Row:
        """One line of the table."""
        try:
            return self._row(member, call, inputs, numbers)
        except torch.OutOfMemoryError:
            self._on.release()
            return Row(member=member, numbers=numbers, why="out of memory")

    def _row(self, member: Member, call: Call, inputs: Sequence[torch.Tensor], numbers: int) -> Row:
        targets = [torch.empty_like(x) for x in inputs]

        def copy(number: int) -> Any:
            return targets[number % len(targets)].copy_(inputs[number % len(inputs)])

        self._timed(call, 1)  # what is made once is made here
        warm_s = self._timed(call, 1)
        at_once = _AT_ONCE if warm_s < _SHORT_S else 1
        runs = max(1, min(RUNS, int(BUDGET_S / max(warm_s * at_once, 1e-9))))
        for one in (call, copy) if runs == RUNS else (copy,):
            self._timed(one, at_once)
        pairs = [(self._timed(call, at_once), self._timed(copy, at_once)) for _ in range(runs)]
        taken_s, copied_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        return Row(
            member=member,
            numbers=numbers,
            ms=1e3 * taken_s,
            copies=taken_s / copied_s,
            runs=runs,
            **self._seen(call),
        )

    def _timed(self, call: Call, times: int) -> float:
        """Seconds of one of several calls one after another."""
        self._on.synchronize()
        with self._on.timer() as timer:
            for _ in range(times):
                self._called += 1
                call(self._called)
        return timer.seconds / times

    def _seen(self, call: Call) -> dict[str, Any]:
        """What a call starts on the device."""
        if self._on.on_host:
            return {}
        recorder = Recorder(self._on)
        recorder.start()
        self._called += 1
        call(self._called)
        calls, taken_ms = Counter[str](), Counter[str]()
        for name, start_s, end_s in recorder.stop():
            calls[name] += 1
            taken_ms[name] += 1e3 * (end_s - start_s)  # type: ignore[assignment]
        return {
            "kernels": calls.total(),
            "busy_ms": taken_ms.total(),
            "slowest": tuple((name, calls[name], ms) for name, ms in taken_ms.most_common(_NAMED)),
        }


def sides(numbers: int) -> tuple[int, int]:
    """Rows and columns of a matrix of so many numbers, a power of two, as square as may be."""
    rows = 1 << (numbers.bit_length() - 1) // 2
    return rows, numbers // rows


def rows(given: argparse.Namespace, bench: Bench) -> Iterator[Row]:
    """All lines, as they are timed."""
    coders, makers = (
        [each for each in members if not given.only or type(each.kind).__name__ in given.only]
        for members in (compressors(), aggregators())
    )
    took_ms: dict[str, float] = {}
    for numbers in given.numbers:
        inputs = bench.inputs(*sides(numbers)) if coders else []
        for member in coders:
            before_ms = took_ms.get(member.name, 0.0)
            if member.bound is None and before_ms > 1e3 * SLOW_S:
                yield Row(member=member, numbers=numbers, why="left out: slow on fewer")
                continue
            row = bench.row(member, coding(member.kind, inputs), inputs, numbers)
            took_ms[member.name] = row.ms
            yield row
    for numbers in given.numbers:
        inputs = bench.inputs(ROWS, numbers) if makers else []
        for member in makers:
            yield bench.row(member, aggregating(member.kind, inputs), inputs, numbers)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numbers", type=int, nargs="+", default=SIZES, help="powers of two")
    parser.add_argument("--only", nargs="*", default=[], help="kinds")
    given = parser.parse_args()
    accelerator, begun_s = accelerators.detect(), time.monotonic()
    accelerator.set(0)
    print(f"{where()}, {datetime.datetime.now(tz=datetime.UTC).date()}; {ROWS} rows to aggregate\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    done = []
    for row in rows(given, Bench(accelerator)):
        done.append(row)
        print(f"| {' | '.join(row.cells)} |", flush=True)
    bounded = [row for row in done if row.holds is not None]
    held = sum(bool(row.holds) for row in bounded)
    print(f"\n{held} of {len(bounded)} hold; {time.monotonic() - begun_s:.0f} s in all")
    broken = [row for row in bounded if not row.holds and row.slowest]
    if broken:
        print("\n| member | size | on the device | times | ms |\n|---|---|---|---|---|")
    for row in broken:
        for name, count, ms in row.slowest:
            shown = name.replace("|", "/")[:90]
            print(f"| {row.cells[0]} | {row.cells[1]} | `{shown}` | {count} | {ms:.3f} |")


if __name__ == "__main__":
    main()
