"""Seconds to read a generated svmlight file: polyreme's reader beside scikit-learn's, in turn.

``python benchmarks/read_svmlight.py [--mb 200] [--digits 17] [--gzip] [--repeats 3]``
Both read the same file, and their numbers are compared bit by bit.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_svmlight_file

from polyreme.data import svmlight_text


def write(path: Path, n_bytes: int, digits: int, seed: int = 0) -> None:
    """Rows of about 50 of 100,000 features, with values of so many digits."""
    random, form = np.random.default_rng(seed), f"%d:%.{digits}g"
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        written = 0
        while written < n_bytes:
            lines = []
            for n in random.integers(20, 80, 1000):
                indices = np.unique(random.integers(1, 100_001, n)).tolist()
                values = random.normal(size=len(indices)).tolist()
                pairs = " ".join([form % pair for pair in zip(indices, values, strict=True)])
                lines.append(f"{random.choice((-1, 1)):+d} {pairs}\n")
            text = "".join(lines).encode()
            written += len(text)
            file.write(text)


def main() -> None:
    """Print the seconds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=200, help="size of the text")
    parser.add_argument("--digits", type=int, default=6, help="of a value; 17 write all of it")
    parser.add_argument("--gzip", action="store_true", help="pack the file")
    parser.add_argument("--repeats", type=int, default=3, help="turns of both")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder, "small.svm")
        small.write_text("1 1:1\n")
        svmlight_text.read([small])  # compiles
        path = Path(folder, "big.svm.gz" if asked.gzip else "big.svm")
        write(path, int(asked.mb * 1e6), asked.digits)
        print(f"{asked.mb:g} MB, {asked.digits} digits, {path.suffix}, best of {asked.repeats}")
        ours, theirs = [], []
        for _ in range(asked.repeats):
            began = time.perf_counter()
            ((rows, labels),) = svmlight_text.read([path])
            ours.append(time.perf_counter() - began)
            began = time.perf_counter()
            matrix, targets = load_svmlight_file(str(path))
            theirs.append(time.perf_counter() - began)
            print(f"polyreme {ours[-1]:8.2f} s   scikit-learn {theirs[-1]:8.2f} s")
        same = (
            np.array_equal(rows.values.view(np.int64), matrix.data.view(np.int64))
            and np.array_equal(rows.indices, matrix.indices)
            and np.array_equal(rows.indptr, matrix.indptr)
            and np.array_equal(labels, targets)
        )
        print(f"{len(rows)} rows, {rows.n_stored} numbers, the same bit by bit: {same}")
        print(f"{min(theirs) / min(ours):.1f} times as fast, {asked.mb / min(ours):.0f} MB/s")


if __name__ == "__main__":
    main()
