"""The largest differences that `polyreme verify` sees where nothing is wrong.

    python benchmarks/verify.py [--steps 3] [--processes 1 2 4] [--examples digits quickstart]
                                [--families [NAME ...]]

Examples run as whole verifications under every level, all devices as shards and as two replicas of
half as many; each row has the largest over these. `--families` runs the tiny models of the tests
(all, or those named) in the tests' processes instead, in every layout of tests/test_verify.py.
In float32 the column "parameters" is of updates.
Exit code 1 where any differs by more than its tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import polyreme as pr

EXAMPLES = Path(__file__).parent.parent / "examples"
LEVELS = ("none", "optimizer", "grads", "params")
PRECISIONS = {"float64": "fp64", "float32": "fp32"}


class Errors(NamedTuple):
    """Relative errors of one verification, and whether they are within the tolerance."""

    loss: float
    gradient: float
    parameters: float
    passed: bool


def example(name: str, n: int, dtype: str, n_steps: int) -> Iterator[Errors]:
    """An example on n processes, in every layout."""
    layouts = [(1, n, level) for level in (LEVELS if n > 1 else LEVELS[:1])]
    layouts += [(2, n // 2, level) for level in LEVELS if n > 2 and n % 2 == 0]
    for replica, shard, level in layouts:
        fixed = [f"parallel.replica={replica}", f"parallel.shard={shard}"]
        fixed += [f'parallel.level="{level}"', f"cluster.cpu_processes={n}"]
        spec = EXAMPLES / f"{name}.toml"
        found = pr.verify(spec, overrides=fixed, devices=n, steps=n_steps, dtype=dtype)
        assert found is not None, "no launcher started this"
        if not found.passed:
            print(f"{name}, {found.plan}, {dtype}: {found.difference}", file=sys.stderr)
        yield Errors(
            found.max_loss_error, found.max_grad_error, found.max_parameter_error, found.passed
        )


def families(names: Sequence[str], dtype: str, n_steps: int) -> Iterator[tuple[str, list[Errors]]]:
    """Each family of the tests with its errors in every layout."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from beside import Family, beside
    from polyreme.algo.rule import AdamW
    from pool import Pool
    from test_verify import FAMILIES, LAYOUTS

    pool = Pool()
    try:
        for name in names or FAMILIES:
            options, sample = FAMILIES[name]
            found = []
            for layout in LAYOUTS:
                case = Family(
                    options=options,
                    sample=sample,
                    plan={**layout, "precision": PRECISIONS[dtype]},
                    rule=AdamW(lr=1e-3),
                )
                group = pool(layout.get("replica", 1) * layout.get("shard", 1))
                verdict = group.run(beside, case, None, n_steps, timeout_s=120)[0]
                if verdict.first is not None:
                    print(f"{name}, {layout}, {dtype}: {verdict.first.words}", file=sys.stderr)
                found.append(
                    Errors(
                        verdict.max_loss_error,
                        verdict.max_grad_error,
                        verdict.max_parameter_error,
                        verdict.first is None,
                    )
                )
            yield name, found
    finally:
        pool.close()


def show(what: str, n: str, dtype: str, found: Sequence[Errors]) -> bool:
    """Print a row of the largest errors; whether all passed."""
    worst = [max(column) for column in list(zip(*found, strict=True))[:3]]
    columns = " ".join(f"{error:10.1e}" for error in worst)
    print(f"{what:22} {n:>9} {dtype} {len(found):5} {columns}", flush=True)
    return all(each.passed for each in found)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--examples", nargs="+", default=["digits", "quickstart"])
    parser.add_argument("--families", nargs="*")
    options = parser.parse_args()
    print(f"{'what':22} {'processes':>9} {'dtype':7} {'runs':>5} "
          f"{'loss':>10} {'gradient':>10} {'parameters':>10}")  # fmt: skip
    passed = True
    for dtype in PRECISIONS:
        if options.families is not None:
            everything: list[Errors] = []
            for name, found in families(options.families, dtype, options.steps):
                passed &= show(name, "1 to 3", dtype, found)
                everything += found
            show("all families", "1 to 3", dtype, everything)
            continue
        for name in options.examples:
            for n in options.processes:
                found = list(example(name, n, dtype, options.steps))
                passed &= show(name, str(n), dtype, found)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
