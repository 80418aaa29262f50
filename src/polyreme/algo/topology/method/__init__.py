"""Gossip methods: how neighbours' models are mixed. One file a method, one line in the union."""

from __future__ import annotations

from .choco import CHOCO as CHOCO
from .d_psgd import DPSGD as DPSGD
from .dcd import DCD as DCD
from .dcd import ECD as ECD
from .sgp import SGP as SGP

Method = DPSGD | SGP | DCD | ECD | CHOCO
