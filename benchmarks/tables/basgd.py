"""Claim on hostile workers that nobody waits for: BASGD learns on where ASGD does not.

python benchmarks/tables/basgd.py --data DIR --images 20000 --epochs 20 [--task mnist] [--jobs 16]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trials import Result, Trial, holds, model, near_chance, options, run_all, show

SLOW = {"compute": {"kind": "heterogeneous", "slow_fraction": 0.25, "slow_factor": 5.0}}
PER_WORKER = 64  # samples of a gradient
WORKERS, BUFFERS = 16, 8
HOSTILE = [5, 10, 15]  # none of the slow ones, each in a buffer of its own
ATTACKS: Mapping[str, Mapping[str, Any] | None] = {
    "no attack": None,
    "sign flip": {"kind": "SignFlip", "workers": HOSTILE, "scale": 10.0},
    "noise": {"kind": "Noise", "workers": HOSTILE, "sigma": 0.2, "relative": True},
}

SGD = {"kind": "SGD", "weight_decay": 1e-4}
SYNC = {"kind": "BASGD", "buffers": BUFFERS}
MEDIAN = {"kind": "CoordinateMedian", "byzantine": len(HOSTILE)}
GEOMETRIC = {"kind": "GeometricMedian", "byzantine": len(HOSTILE)}
MOMENTUM = {"kind": "WorkerMomentum", "momentum": 0.9}
METHODS: Mapping[str, tuple[Mapping[str, Any], tuple[float, ...]]] = {
    "ASGD": ({"rule": SGD, "sync": {"kind": "ASGD"}}, (0.01, 0.03, 0.1)),
    "BASGD, median": ({"rule": SGD, "sync": SYNC, "aggregate": MEDIAN}, (0.1, 0.3, 0.9)),
    "BASGD, geometric median": (
        {"rule": SGD, "sync": SYNC, "aggregate": GEOMETRIC},
        (0.1, 0.3, 0.9),
    ),
    "BASGDm, geometric median": (
        {"rule": SGD, "sync": SYNC, "aggregate": GEOMETRIC, "feedback": MOMENTUM},
        (0.1, 0.3, 0.9),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    given = options(__doc__, tasks=True, arguments=arguments)
    trials = [
        Trial(
            name=f"{method}, {name}",
            rates=rates,
            data_parallel=parallel,
            model=model(given.task),
            workers=WORKERS,
            batch=PER_WORKER * WORKERS,
            simulate=SLOW if attack is None else {**SLOW, "attack": attack},
        )
        for name, attack in ATTACKS.items()
        for method, (parallel, rates) in METHODS.items()
    ]
    found = run_all("basgd", trials, given)
    attacks = [name for name, attack in ATTACKS.items() if attack is not None]
    claims: list[tuple[str, Any]] = []
    for name in attacks:
        claims.append((f"{name}: ASGD does not learn", partial(_near, found, f"ASGD, {name}")))
        for method in METHODS:
            if method != "ASGD":
                judged = partial(_above, found, f"{method}, {name}", f"ASGD, {name}")
                claims.append((f"{name}: {method} is above ASGD", judged))
    title = f"BASGD, {WORKERS} workers of which {len(HOSTILE)} are hostile, {BUFFERS} buffers"
    show(title, found, {}, claims, "ASGD, no attack")


def _above(found: Mapping[str, Result], one: str, other: str) -> str:
    return holds(found[one], found[other])


def _near(found: Mapping[str, Result], name: str) -> str:
    return near_chance(found[name])


if __name__ == "__main__":
    main()
