"""Momentum that two workers keep under top-k, on a problem whose halves pull apart.

Worker 0 has F = sum (d - i) (w_i - (i + 1))^2, worker 1 F = sum (d - i) (w_i + (i + 1))^2, i from
0; the optimum of their mean is 0. Each sends one entry a step. Prints how far from the optimum the
mean model ends, and draws the way there. Source of the problem: the slides of "Global Momentum
Compression for Sparse Communication in Distributed Learning" (Zhao et al. 2019).

    python benchmarks/gmc_toy.py [--svg docs/images/gmc-toy.svg]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from polyreme.algo.compose import DataParallel
from polyreme.algo.compress import Dense, TopK
from polyreme.algo.effects import Computed
from polyreme.algo.feedback import DGC, GMC
from polyreme.algo.rule import SGD
from polyreme.algo.vector import Layout
from polyreme.algo.worker import Worker
from polyreme.sim.driver import Simulation

STEPS, EVERY = 3_000, 10
RATES = {2: 3e-3, 20: 1e-4}
START = {2: 2.0, 20: 1.0}  # of every entry
COLOURS = {"GMC": "#1a7f37", "DGC": "#b35900", "DGC, masked": "#b3261e", "all sent": "#6e7781"}


def algorithms(d: int) -> dict[str, DataParallel]:
    """What is compared; one entry of `d` is sent."""
    top = TopK(ratio=1 / d)
    rate = SGD(lr=RATES[d])
    return {
        "GMC": DataParallel(rule=rate, compress=top, feedback=GMC(momentum=0.9)),
        "DGC": DataParallel(rule=rate, compress=top, feedback=DGC(momentum=0.9, masking=False)),
        "DGC, masked": DataParallel(rule=rate, compress=top, feedback=DGC(momentum=0.9)),
        "all sent": DataParallel(rule=rate, compress=Dense(), feedback=GMC(momentum=0.9)),
    }


def way(algorithm: DataParallel, d: int) -> list[float]:
    """Distances from the optimum, every `EVERY` steps."""
    place = torch.arange(d, dtype=torch.float64)
    pull, aim = d - place, place + 1

    def gradients(rank: int, params: torch.Tensor, batch: int) -> Computed:  # noqa: ARG001
        found = 2 * pull * (params - (aim if rank == 0 else -aim))
        return Computed(gradient=found, loss=0.0, weight=1.0, n_samples=1)

    layout = Layout.of({"w": (d,)})
    workers = [Worker(rank=r, n=2, layout=layout, seed=0, lr=lambda _: RATES[d]) for r in (0, 1)]
    start = torch.full((d,), START[d], dtype=torch.float64)
    states = [algorithm.sync.init(algorithm, start.clone(), me) for me in workers]
    simulation = Simulation(algorithm, workers, states, gradients)
    found = []
    for step in range(EVERY, STEPS + 1, EVERY):
        simulation.play(step)
        found.append(float(simulation.states[0]["params"].norm()))
    return found


def curve(distances: list[float], left: int, colour: str) -> str:
    """One line of a panel: steps across, distance on a logarithmic scale from 10 down to 1e-5."""
    points = []
    for index, distance in enumerate(distances):
        depth = (1 - math.log10(max(distance, 1e-5))) / 6
        points.append(f"{left + 300 * (index + 1) / len(distances):.1f},{30 + 240 * depth:.1f}")
    line = " ".join(points)
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def figure(ways: dict[int, dict[str, list[float]]]) -> str:
    """Both panels."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 330">',
        "<title>Distance from the optimum over steps, for each algorithm</title>",
        '<rect width="760" height="330" fill="#ffffff"/>',
        '<g font-family="sans-serif" font-size="12" fill="#1f2328">',
    ]
    for number, (d, each) in enumerate(ways.items()):
        left = 60 + 360 * number
        parts.append(f'<text x="{left}" y="20">{d} entries, one of them sent</text>')
        for power in range(1, -6, -1):
            y = 30 + 40 * (1 - power)
            parts.append(
                f'<line x1="{left}" x2="{left + 300}" y1="{y}" y2="{y}" stroke="#d0d7de"/>'
                f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">1e{power}</text>'
            )
        parts += [curve(distances, left, COLOURS[name]) for name, distances in each.items()]
        parts.append(f'<text x="{left}" y="290">0</text>')
        parts.append(f'<text x="{left + 300}" y="290" text-anchor="end">{STEPS:,} steps</text>')
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = 60 + 150 * number
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="314" y2="314" stroke="{colour}"/>')
        parts.append(f'<text x="{x + 26}" y="318">{name}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ways = {
        d: {name: way(algorithm, d) for name, algorithm in algorithms(d).items()} for d in RATES
    }
    print(f"distance from the optimum after {STEPS:,} steps")
    print("entries  " + "  ".join(f"{name:>12}" for name in COLOURS))
    for d, each in ways.items():
        print(f"{d:7}  " + "  ".join(f"{each[name][-1]:12.2e}" for name in COLOURS))
    if options.svg is not None:
        options.svg.write_text(figure(ways))


if __name__ == "__main__":
    main()
