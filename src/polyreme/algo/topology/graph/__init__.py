"""Gossip graphs: who takes how much of whom. One file a graph, one line in the union."""

from __future__ import annotations

from .complete import Complete as Complete
from .exponential import Exponential as Exponential
from .matching import RandomMatching as RandomMatching
from .matrix import Matrix as Matrix
from .ring import RingGraph as RingGraph
from .torus import TorusGraph as TorusGraph

Graph = RingGraph | TorusGraph | Exponential | Complete | RandomMatching | Matrix
