"""Topologies: with whom a replica exchanges. One file a topology, one line in the union."""

from __future__ import annotations

from .all_reduce import AllReduce as AllReduce

Topology = AllReduce
