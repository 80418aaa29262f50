"""The searched order against others on drawn stages: makespans, and what the search takes.

    python benchmarks/order_search.py [--draws N]

F, I and W of each stage are drawn from 0.2 to 2, messages take 0 or 0.1. "Alone" is what the solver
finds without the orders that are taken where they are shorter. The bound is of the rank that must
end last: when it can start, and all that it plays.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from polyreme.plan.order import ORDERS
from polyreme.plan.order.searched import found_alone
from polyreme.plan.play import Costs, play

SIZES = ((4, 4), (4, 8), (4, 32), (8, 8), (8, 16), (8, 32))
HEADER = "| p | m | / zb-auto | / zb-h1 | / 1f1b | / bound | alone: shorter, as long, longer | s |"


def main() -> None:
    """Print a row for each number of ranks and microbatches."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, default=10)
    draws = parser.parse_args().draws
    print(HEADER, "|" + "---|" * HEADER.count(" |"), sep="\n")
    for p, m in SIZES:
        print(_row(p, m, draws), flush=True)


def _row(p: int, m: int, draws: int) -> str:
    ratios: dict[str, list[float]] = {"zb-auto": [], "zb-h1": [], "1f1b": [], "bound": []}
    against, took_s = [0, 0, 0], []
    for seed in range(draws):
        costs = _drawn(random.Random(f"{p} {m} {seed}"), p, 0.1 * (seed % 2))

        def makespan_s(name: str, costs: Costs = costs) -> float:
            return play(ORDERS[name].actions(p, m, costs), p, costs).makespan_s

        start_s = time.perf_counter()
        alone_s = min(play(each, p, costs).makespan_s for each in found_alone(p, m, costs))
        took_s.append(time.perf_counter() - start_s)
        others = {name: makespan_s(name) for name in ("zb-auto", "zb-h1", "1f1b")}
        for name, other_s in {**others, "bound": _bound_s(p, m, costs)}.items():
            ratios[name].append(makespan_s("searched") / other_s)
        share = alone_s / others["zb-auto"] - 1
        against[0 if share < -1e-9 else 1 if share < 1e-9 else 2] += 1
    means = " | ".join(f"{statistics.mean(each):.3f}" for each in ratios.values())
    return (
        f"| {p} | {m} | {means} | {', '.join(map(str, against))} | {statistics.mean(took_s):.1f} |"
    )


def _drawn(draw: random.Random, p: int, send: float) -> Costs:
    forward, inputs, weights = (tuple(draw.uniform(0.2, 2.0) for _ in range(p)) for _ in range(3))
    return Costs(forward=forward, inputs=inputs, weights=weights, send=send)


def _bound_s(p: int, m: int, costs: Costs) -> float:
    heads = [sum(costs.forward[:rank]) + rank * costs.send for rank in range(p)]
    busy = [sum(each) for each in zip(costs.forward, costs.inputs, costs.weights, strict=True)]
    return max(head + m * each for head, each in zip(heads, busy, strict=True))


if __name__ == "__main__":
    main()
