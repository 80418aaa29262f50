"""Memory of an accelerator: what tensors take of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a device whose allocator knows growing segments"
)

TAKEN = """
import dataclasses, os
for name in [each for each in os.environ if each.endswith("ALLOC_CONF")]:
    del os.environ[name]
import torch
from polyreme.cluster import accelerator as accelerators
found = dataclasses.replace(accelerators.detect(), memory_limit_bytes=None)
found.set(0)
kept = [torch.empty(25 * 2**20, dtype=torch.uint8, device=found.device(0)) for _ in range(16)]
print(found.allocated_bytes() - sum(each.nbytes for each in kept))
"""


def test_tensors_take_no_more_than_they_need() -> None:
    """Each of 25 MiB took 26: segments come by 2 MiB, and so little was not cut off."""
    run = [sys.executable, "-c", TAKEN]
    assert int(subprocess.run(run, capture_output=True, check=True, text=True).stdout) == 0


def test_the_limit_of_a_device_holds_where_segments_grow() -> None:
    """Bytes that a process may have are still refused beyond it."""
    short = TAKEN.replace("memory_limit_bytes=None", "memory_limit_bytes=200 * 2**20")
    assert short != TAKEN
    run = [sys.executable, "-c", short]
    ended = subprocess.run(run, capture_output=True, check=False, text=True)
    assert "OutOfMemoryError" in ended.stderr
