"""What is done to rows before an aggregator: one file each, one line in the union."""

from __future__ import annotations

from .arc import ARC as ARC
from .bucketing import Bucketing as Bucketing
from .clipping import Clipping as Clipping
from .nearest import NearestNeighbourMixing as NearestNeighbourMixing

Before = Bucketing | NearestNeighbourMixing | Clipping | ARC
