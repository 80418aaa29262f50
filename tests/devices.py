"""What tests ask of the machine they run on."""

from __future__ import annotations

import pytest

from polyreme.cluster.accelerator import detect

TWO = pytest.mark.skipif(detect().count() < 2, reason="needs two devices of one kind")
