"""Thousands of wrong specs and files: each is refused with exit code 2, in time and in full.

    python benchmarks/bad_specs.py [--pairs N] [--seed N] [--commands N] [--limit-s S]

Faults are derived from the option structs (tests/bad_specs.py). Each is given to the function that
the console script calls: it must end with exit code 2, no traceback, the fault at its path with
value, rule and legal values in words and as JSON, and the first legal value, put in its place, must
be accepted. A sample runs as whole commands in processes of their own, against the limit.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import bad_files
import bad_specs
import refusals


class Tally:
    """Counts, times and complaints by what was tried."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.found: list[str] = []

    def note(self, what: str, seconds: float, complaints: Sequence[str], name: str) -> None:
        """Count one try; `name` says which."""
        self.seconds[what].append(seconds)
        if seconds > self.limit_s:
            complaints = [*complaints, f"took {seconds:.1f} s"]
        self.found += [f"{what}, {name}: {complaint}" for complaint in complaints]

    def show(self) -> None:
        """Print the table, and what was wrong."""
        print(f"{'what':34} {'n':>6} {'median s':>9} {'max s':>8}")
        for what, seconds in self.seconds.items():
            middle = statistics.median(seconds)
            print(f"{what:34} {len(seconds):6} {middle:9.4f} {max(seconds):8.3f}")
        total = sum(map(len, self.seconds.values()))
        print(f"{'all':34} {total:6}   faults found: {len(self.found)}")
        for each in self.found[:40]:
            print(f"  {each}"[:600])


def timed(arguments: Sequence[str]) -> tuple[refusals.Said, float]:
    """What a command says, and its seconds."""
    start_s = time.perf_counter()
    said = refusals.command(arguments)
    return said, time.perf_counter() - start_s


def specs(n_pairs: int, seed: int) -> Iterator[tuple[str, tuple[bad_specs.Fault, ...]]]:
    """Every single fault, and pairs of them."""
    for fault in bad_specs.singles():
        yield "one wrong field", (fault,)
    for pair in bad_specs.pairs(n_pairs, seed):
        yield "two wrong fields", pair


def whole_commands(written: Sequence[Path], n: int, seed: int, tally: Tally) -> None:
    """Each in a process of its own, with all that starting costs."""
    sample = random.Random(seed).sample(list(written), min(n, len(written)))
    for path in sample:
        start_s = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "polyreme", "check", str(path), "--json"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        seconds = time.perf_counter() - start_s
        said = refusals.Said(code=done.returncode, out=done.stdout, err=done.stderr)
        tally.note("whole commands", seconds, refusals.complaints(said, ()), path.name)


def main() -> int:
    """Exit code 1 where any fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=3.0)
    options = parser.parse_args()
    import torch  # so that its import counts in whole commands alone

    torch.set_num_threads(1)
    tally = Tally(options.limit_s)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        bad_specs.files(Path())
        documents = bad_specs.documents()
        written = []
        Path("made").mkdir()
        for index, (what, wrong) in enumerate(specs(options.pairs, options.seed)):
            document = bad_specs.made(documents[wrong[0].base], *wrong)
            path = Path(f"made/wrong-{index}.toml")
            path.write_bytes(bad_specs.toml(document))
            written.append(path)
            reported = [fault.reported for fault in wrong]
            said, seconds = timed(["check", str(path), "--json"])
            complaints = refusals.complaints(said, reported, document)
            complaints += refusals.unmended(document, reported)
            name = ", ".join(f"{fault.path} = {fault.value!r:.60}" for fault in wrong)
            tally.note(what, seconds, complaints, name)
        for index, (name, content) in enumerate(bad_files.texts(bad_files.SOUND)):
            path = Path(f"made/text-{index}.toml")
            if content is None:
                path.mkdir()
            else:
                path.write_bytes(content)
            written.append(path)
            said, seconds = timed(["check", str(path), "--json"])
            tally.note("no spec at all", seconds, refusals.complaints(said, ()), name)
        for what, name, arguments, reported in bad_files.commands(Path("made"), options.seed):
            said, seconds = timed(arguments)
            tally.note(what, seconds, refusals.complaints(said, reported), name)
        whole_commands(written, options.commands, options.seed, tally)
        os.chdir("/")
    tally.show()
    return 1 if tally.found else 0


if __name__ == "__main__":
    sys.exit(main())
