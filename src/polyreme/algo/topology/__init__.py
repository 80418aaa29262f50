"""Topologies: with whom a replica exchanges. One file a topology, one line in the union."""

from __future__ import annotations

from .all_reduce import AllReduce as AllReduce
from .auto import Auto as Auto
from .binary_tree import BinaryTree as BinaryTree
from .double_binary_tree import DoubleBinaryTree as DoubleBinaryTree
from .gossip import Gossip as Gossip
from .hierarchical import Hierarchical as Hierarchical
from .parameter_server import ParameterServer as ParameterServer
from .recursive_doubling import RecursiveDoubling as RecursiveDoubling
from .ring import Ring as Ring
from .torus import Torus2D as Torus2D

Topology = (
    AllReduce
    | Ring
    | RecursiveDoubling
    | BinaryTree
    | DoubleBinaryTree
    | Hierarchical
    | Torus2D
    | ParameterServer
    | Auto
    | Gossip
)
