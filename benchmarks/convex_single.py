"""Seconds to a relative 1e-6 of the optimum: polyreme.linear, liblinear and saga, on one core.

Each is asked for tolerances that fall by tens until its objective is within 1e-6 of the best known;
timed is the first that suffices, the median of repetitions taken in turns. "certified" asks ours
for a duality gap of that size. What runs longer than --limit is ended and printed as "> N".

    OMP_NUM_THREADS=1 POLYREME_DATA=... python benchmarks/convex_single.py a9a w8a generated
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sparse_set import sparse_set

from polyreme.linear import fit

NEAR = 1e-6
TOLERANCES = {
    "ours": [10.0**-k for k in range(2, 10)],
    "certified": [NEAR],
    "liblinear": [10.0**-k for k in range(1, 10)],
    "saga": [10.0**-k for k in range(1, 8)],
}
STRENGTHS = {"a9a": (1e-4, 1e-4), "w8a": (1e-4, 1e-4), "generated": (1e-5, 1e-6)}  # l1, l2


def read(name: str, rows: int) -> tuple[sparse.csr_matrix, np.ndarray]:
    """Rows and labels; of the generated set, as many rows as features."""
    if name == "generated":
        made, y = sparse_set(rows, rows)
        parts = made.values.astype(float), made.indices, made.indptr.astype(np.int32)
        return sparse.csr_matrix(parts, shape=(rows, rows)), y
    with np.load(Path(os.environ["POLYREME_DATA"], "libsvm", f"{name}.npz")) as packed:
        y = packed["train_y"].astype(float)
        parts = packed["train_data"].astype(float), packed["train_indices"], packed["train_indptr"]
        return sparse.csr_matrix(parts, shape=(len(y), int(packed["n_features"][0]))), y


def timed(
    who: str, X: sparse.csr_matrix, y: np.ndarray, l1: float, l2: float, tol: float
) -> tuple[float, float]:
    """Seconds of a fit, and the objective at what it found."""
    warnings.simplefilter("ignore")
    start = time.perf_counter()
    if who in ("ours", "certified"):
        w = fit(X, y, l1=l1, l2=l2, tol=tol).w
        seconds = time.perf_counter() - start
    else:
        peer = LogisticRegression(
            C=1 / (len(y) * (l1 + l2)),
            l1_ratio=l1 / (l1 + l2),
            solver=who,
            tol=tol,
            max_iter=10**6,
            fit_intercept=False,
            random_state=0,
        ).fit(X, y)
        seconds = time.perf_counter() - start
        w = peer.coef_[0]
    mean = np.logaddexp(0, -y * (X @ w)).mean()
    return seconds, float(mean + l1 * np.abs(w).sum() + l2 / 2 * (w @ w))


def within(limit_s: float, task: Callable[[], tuple[float, float]]) -> tuple[float, float] | None:
    """What a process of its own answers in time."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(task()))
    process.start()
    answer = ours.recv() if ours.poll(limit_s) else None
    process.kill()
    process.join()
    return answer


def rows_of(name: str, n_rows: int, repeats: int, limit_s: float) -> list[str]:
    """Lines of the table of one set."""
    X, y = read(name, n_rows)
    lines = []
    for penalty, strength in zip(("l1", "l2"), STRENGTHS[name], strict=True):
        l1, l2 = (strength, 0.0) if penalty == "l1" else (0.0, strength)
        best = timed("ours", X, y, l1, l2, 1e-10)[1]
        chosen, seconds = {}, {}
        for who, tolerances in TOLERANCES.items():
            for tol in tolerances:
                tol = tol * best if who == "certified" else tol
                answer = within(limit_s, lambda: timed(who, X, y, l1, l2, tol))  # noqa: B023
                if answer is None:
                    break
                best = min(best, answer[1])
                if answer[1] <= best * (1 + NEAR):
                    chosen[who] = tol
                    break
        for _ in range(repeats):
            for who, tol in chosen.items():
                answer = within(2 * limit_s, lambda: timed(who, X, y, l1, l2, tol))  # noqa: B023
                if answer is not None:
                    seconds.setdefault(who, []).append(answer[0])
        ours = statistics.median(seconds["ours"])
        for who in TOLERANCES:
            if who in seconds:
                median = statistics.median(seconds[who])
                cells = f"{chosen[who]:.0e} | {median:.3f} | {median / ours:.2f}"
            else:
                cells = f"- | > {limit_s:g} | > {limit_s / ours:.1f}"
            lines.append(f"| {name} | {penalty}={strength:g} | {who} | {cells} |")
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", nargs="+", choices=sorted(STRENGTHS))
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS")
    given = parser.parse_args()
    small, labels = sparse_set(20000, 20000)
    for each in ({"l1": 1e-4}, {"l2": 1e-4}):  # compiles
        fit(small.scipy().astype(float), labels, **each)
        fit(small.scipy().astype(float)[:, :100], labels, **each)
    print("| set | penalty | solver | tolerance | seconds | of ours |\n|---|---|---|---|---|---|")
    for name in given.sets:
        rows_of(name, given.rows, given.repeats, given.limit)


if __name__ == "__main__":
    main()
