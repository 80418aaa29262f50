"""What the planner finds and how long it searches, on clusters of presets; and one instance alone.

python benchmarks/planner.py searches    # models x clusters, from assumed profiles
python benchmarks/planner.py solvers     # one outline: `exact` beside `miqp` on HiGHS, and peers
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from posed import posed

from polyreme.api import steps
from polyreme.plan.describe import describe
from polyreme.planner.search import search
from polyreme.planner.solve.exact import exact
from polyreme.planner.solve.instance import Assignment, Instance
from polyreme.planner.solve.known import SOLVERS, Solver
from polyreme.planner.solve.miqp import miqp

SEARCHES = (
    ("llama-7b", 4, 512),
    ("llama-7b", 32, 512),
    ("llama-13b", 64, 1024),
    ("llama3-405b", 4096, 4096),
    ("t5-large", 16, 256),
    ("swin-huge", 16, 256),
)
SIZES = ((16, 4, 2), (16, 8, 4), (32, 8, 4), (80, 12, 4), (80, 12, 8))  # layers, strategies, stages
ROOMS = (1.7, 2.2, 5.0)  # bytes of a stage for each of its layers, which hold 1 to 4 and more
PEERS_DEADLINE_S = 600.0  # of the wall: none needs it
MOST_MOVED = 32  # layers, where tensors cost seconds on their way: `exact` proves these


def searches() -> Iterator[str]:
    """One line for each: the plan, its predicted step, seconds of the search."""
    yield "model devices batch search_s proved step_s plan"
    for preset, n_devices, batch in SEARCHES:
        problem = posed(preset, f"preset:{n_devices}xH100", batch)
        profile = steps.assumed_profile(problem)
        given = problem.graph, problem.cluster, profile, problem.workload, problem.spec.parallel
        plan = search(*given, top=1)[0]
        assert plan.search is not None
        assert plan.estimate is not None
        yield (
            f"{preset} {n_devices} {batch} {plan.search.search_s:.2f} {plan.search.proved} "
            f"{plan.estimate.step_s:.3f} {describe(plan)}"
        )


def drawn(n_layers: int, n_strategies: int, n_stages: int, *, alike: bool) -> Instance:
    """Strategies that trade time for memory; layers of one kind, or all different."""
    rng = np.random.default_rng(n_layers * n_strategies)
    rows = 1 if alike else n_layers
    held = np.sort(rng.uniform(1, 4, (rows, n_strategies)))[:, ::-1]
    time_s = np.sort(rng.uniform(1, 2, (rows, n_strategies)))
    shape = (n_stages, n_layers, n_strategies)
    between = np.full((n_layers - 1, n_strategies, n_strategies), 0.1)
    memory = np.broadcast_to(held, (n_layers, n_strategies))
    later = 1 + 0.1 * np.arange(n_stages)[::-1, None, None]
    return Instance(
        time=np.broadcast_to(time_s, shape).copy(),
        memory=memory * later,
        capacity=np.full(n_stages, 2.2 * n_layers / n_stages),
        inside=np.zeros_like(between),
        between=between,
        beta=7.0,
    )


def solvers(limit_s: float) -> Iterator[str]:
    """One line for each size: seconds of both, and that they agree."""
    yield "layers strategies stages kinds exact_s miqp_s exact miqp"
    for alike in (True, False):
        for size in SIZES:
            instance = drawn(*size, alike=alike)
            start = time.perf_counter()
            found = exact(instance)
            exact_s = time.perf_counter() - start
            start = time.perf_counter()
            other = miqp(instance, deadline_s=limit_s)
            miqp_s = time.perf_counter() - start
            kinds = "one" if alike else "all"
            yield (
                f"{' '.join(map(str, size))} {kinds} {exact_s:.3f} "
                f"{f'{miqp_s:.1f}' if other.proved else f'>{limit_s:.0f}'} "
                f"{found.objective_s:.6f} {other.objective_s:.6f}"
            )


def varied() -> Iterator[Instance]:
    """Of all sizes: layers alike or not, three rooms, tensors free or not."""
    rng = np.random.default_rng(0)
    for size, alike, room in itertools.product(SIZES, (True, False), ROOMS):
        n_layers, n_strategies, n_stages = size
        plain = drawn(*size, alike=alike)
        plain = replace(plain, capacity=np.full(n_stages, room * n_layers / n_stages))
        rows = 1 if alike else n_layers - 1
        pairs = rng.uniform(0, 0.3, (rows, n_strategies, n_strategies))
        moved = np.broadcast_to(pairs * ~np.eye(n_strategies, dtype=bool), plain.inside.shape)
        both = plain, replace(plain, inside=moved, between=plain.between + moved)
        yield from both if n_layers <= MOST_MOVED else both[:1]


def peers() -> Iterator[str]:
    """One line for each solver but `miqp`: how it does on the same instances beside `exact`."""
    instances = list(varied())
    timed = {
        name: [_timed(solve, instance) for instance in instances]
        for name, solve in SOLVERS.items()
        if name != "miqp"
    }
    n_proved = sum(found.proved for found, _ in timed["exact"])
    best = np.array([found.objective_s for found, _ in timed["exact"]])
    there = np.isfinite(best)
    yield f"{len(instances)} instances, {n_proved} proved, {there.sum()} with an assignment"
    yield "solver solved median worst cpu_s_median cpu_s_worst"
    for name, rows in timed.items():
        values = np.array([found.objective_s for found, _ in rows])[there]
        seconds = np.array([seconds for _, seconds in rows])[there]
        shares = (values / best[there])[np.isfinite(values)]
        yield (
            f"{name} {len(shares)} {np.median(shares):.4f} {shares.max():.4f} "
            f"{np.median(seconds):.3f} {seconds.max():.2f}"
        )


def _timed(solve: Solver, instance: Instance) -> tuple[Assignment, float]:
    start = time.process_time()
    found = solve(instance, deadline_s=PEERS_DEADLINE_S)
    return found, time.process_time() - start


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("searches", "solvers"))
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for miqp (0: without)")
    arguments = parser.parse_args()
    beside = solvers(arguments.limit) if arguments.limit else ()
    lines = searches() if arguments.what == "searches" else itertools.chain(beside, peers())
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
