"""Aggregators: one vector of many. One file an aggregator, one line in the union."""

from __future__ import annotations

from .majority import MajorityVote as MajorityVote
from .mean import Mean as Mean

Aggregator = Mean | MajorityVote
