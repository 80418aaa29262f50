"""What tests ask of the machine they run on."""

from __future__ import annotations

import pytest

from polyreme.cluster.accelerator import detect


def at_least(n: int) -> pytest.MarkDecorator:
    """Skips where the machine has fewer devices; on a host without accelerators all are there."""
    here = detect()
    few = not here.on_host and here.count() < n
    return pytest.mark.skipif(few, reason=f"needs {n} devices of one kind")


TWO = pytest.mark.skipif(detect().count() < 2, reason="needs two devices of one kind")
