"""Commands behind the docs' figures still start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1] / "benchmarks"


def test_every_benchmark_s_imports_are_there() -> None:
    """A function that only they used was renamed, and no test said so."""
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 10
    load = (
        "import runpy, sys\n"
        "for file in sys.argv[2:]:\n"
        "    sys.path[:0] = [sys.argv[1], file.rpartition('/')[0]]\n"
        "    runpy.run_path(file, run_name='loaded')\n"
        "    del sys.path[:2]\n"
    )
    command = [sys.executable, "-c", load, str(ROOT), *map(str, files)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert said.returncode == 0, said.stderr[-2000:]
