"""How often noise alone sets off the rule that marks loss spikes.

    python benchmarks/spikes.py [--steps 1000000]

Draws flat curves of a loss with noise of several tails, a tenth of the loss wide, in runs of 1,000
steps; counts the spikes that the report would list.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from polyreme.report.spikes import spikes
from polyreme.runlog import StepEvent

LOSS, WIDTH, RUN = 3.0, 0.3, 1000
Draw = Callable[[np.random.Generator, int], np.ndarray]
NOISE: dict[str, Draw] = {
    "normal": lambda source, n: source.normal(size=n),
    "Laplace": lambda source, n: source.laplace(size=n) / np.sqrt(2),
    "Student's t, 10 degrees of freedom": lambda source, n: _student(source, 10, n),
    "Student's t, 5 degrees of freedom": lambda source, n: _student(source, 5, n),
    "Student's t, 3 degrees of freedom": lambda source, n: _student(source, 3, n),
}


def _student(source: np.random.Generator, freedom: int, n: int) -> np.ndarray:
    """Draws of Student's t, of deviation 1."""
    drawn: np.ndarray = source.standard_t(freedom, size=n)
    return drawn * np.sqrt((freedom - 2) / freedom)


def step(number: int, loss: float) -> StepEvent:
    """A logged step of this loss."""
    return StepEvent(
        t=float(number), attempt=0, step=number, loss=loss, grad_norm=None, lr=0.0, samples=0,
        tokens=0, step_s=0.0, compute_s=0.0, comm_s=0.0, wait_s=0.0, wire_bytes=0, memory_bytes=0,
    )  # fmt: skip


def false_alarms(draw: Draw, n_runs: int) -> int:
    """Spikes in runs that have none."""
    found = 0
    for seed in range(n_runs):
        losses = LOSS + WIDTH * draw(np.random.default_rng(seed), RUN)
        found += len(spikes([step(n, loss) for n, loss in enumerate(losses.tolist(), start=1)]))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    n_runs = max(1, parser.parse_args().steps // RUN)
    print(f"{'noise':36} {'steps':>10} {'spikes':>8}   one in")
    for name, draw in NOISE.items():
        found = false_alarms(draw, n_runs)
        rate = f"{n_runs * RUN / found:,.0f} steps" if found else "-"
        print(f"{name:36} {n_runs * RUN:10,} {found:8,}   {rate}")


if __name__ == "__main__":
    main()
