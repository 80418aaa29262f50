"""The price of robustness: how far robust aggregates are from the mean where no row is hostile.

python benchmarks/tables/tension.py [--rows 16 --byzantine 3] [--draws 200]

epsilon is the largest ||A(x) - mean||^2 / ((1/n) sum ||x_i - mean||^2) over rows x; nothing that
bears f hostile rows has less than f / (n - f). `random` is the largest over rows drawn from normal,
heavy-tailed and skewed distributions; `worst` starts from these and from k rows at one point and
the others at another, for each k, and climbs by steps drawn at random that are kept where they
raise it. `theory` is what the aggregator says of itself.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import get_args

import torch

import polyreme as pr
from polyreme.algo.aggregate import Aggregator
from polyreme.algo.aggregate.advice import of
from polyreme.algo.aggregate.robust import RobustKind


def ratio(kind: RobustKind, rows: torch.Tensor) -> float:
    """What epsilon is the largest of."""
    mean = rows.mean(0)
    spread = float((rows - mean).square().sum(1).mean())
    if not spread:
        return 0.0
    return float((pr.aggregate.combined(kind, rows) - mean).square().sum()) / spread


def drawn(n: int, count: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Rows at random, of one to twenty entries."""
    for index in range(count):
        d = int(torch.randint(1, 21, (), generator=generator))
        rows = torch.randn(n, d, generator=generator, dtype=torch.float64)
        yield (rows, rows.sinh() * rows.cosh(), rows.exp(), rows.sign() * rows.abs().pow(4))[
            index % 4
        ]


def two_points(n: int) -> Iterator[torch.Tensor]:
    """Some rows at one point, the others at another, first or last."""
    for k in range(1, n):
        rows = torch.zeros(n, 2, dtype=torch.float64)
        rows[:k, 0] = 1.0
        yield rows
        yield 1 - rows


def climbed(
    kind: RobustKind, rows: torch.Tensor, steps: int, generator: torch.Generator
) -> tuple[float, torch.Tensor]:
    """The ratio after so many steps, and where."""
    best, size = ratio(kind, rows), 0.3
    for _ in range(steps):
        step = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        keep = torch.rand(len(rows), 1, generator=generator) < 0.3
        tried = rows + size * float(rows.std()) * step * keep
        found = ratio(kind, tried)
        if found > best:
            best, rows, size = found, tried, min(1.0, 1.5 * size)
        else:
            size = max(1e-3, 0.97 * size)
    return best, rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--byzantine", type=int, default=3)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    n, f = given.rows, given.byzantine
    print(f"n {n}, f {f}, lower bound f / (n - f) {f / (n - f):.4f}")
    print("| aggregator | random | worst | theory | reached |")
    print("|---|---|---|---|---|")
    for cls in get_args(Aggregator):
        if not issubclass(cls, RobustKind):
            continue
        kind = cls(byzantine=f)
        said = of(kind, n)
        if said.refused:
            print(f"| {said.kind} | - | - | {said.refused} | - |")
            continue
        generator = torch.Generator().manual_seed(0)
        starts = sorted(drawn(n, given.draws, generator), key=lambda rows: -ratio(kind, rows))
        random = ratio(kind, starts[0])
        points = sorted(two_points(n), key=lambda rows: -ratio(kind, rows))
        ends = [climbed(kind, rows, given.steps, generator) for rows in (starts[0], points[0])]
        worst = max(end for end, _ in ends)
        theory = "none" if math.isinf(said.epsilon) else f"{said.epsilon:.4f}"
        reached = "-" if math.isinf(said.epsilon) else f"{100 * worst / said.epsilon:.0f} %"
        print(f"| {said.kind} | {random:.4f} | {worst:.4f} | {theory} | {reached} |", flush=True)


if __name__ == "__main__":
    main()
