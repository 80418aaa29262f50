"""What prices drafts: costs by the number of tensor parts, and of layers laid out unlike."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from ..cluster.types import Cluster
from ..graph.layer import LayerGraph
from ..plan.ir import Workload
from ..plan.play import Costs
from ..profile.record import Profile
from .cost.data import DataCost, StepTime
from .cost.layers import LayerCosts
from .cost.memory import Memory
from .cost.pipeline import StepCost
from .draft import Draft
from .outline import Outline
from .room import Fitting
from .solve.instance import Array, Instance
from .unlike import UnlikeCosts


class Timing(Protocol):
    """Seconds of drafts."""

    def __call__(self, draft: Draft) -> StepTime:
        """Of one step, played."""

    def sketched(self, draft: Draft) -> StepTime:
        """The same by the closed form of the order, where it has one."""

    def ordered(self, draft: Draft) -> Draft:
        """The draft with its actions, and how it exchanges."""

    def sliced(self, draft: Draft) -> Draft:
        """The draft with the tokens of each slice, where the cost says how many."""

    def costs(self, draft: Draft) -> Costs:
        """Of each stage's passes over one microbatch."""


class Pricing(Protocol):
    """Numbers of outlines, times of drafts, and whether they fit."""

    @property
    def tied(self) -> Sequence[Sequence[str]]:
        """Layers that share parameters."""

    @property
    def cost(self) -> Timing:
        """Times."""

    @property
    def fitting(self) -> Fitting:
        """Rooms."""

    def instance(self, outline: Outline) -> Instance:
        """The numbers of an outline."""

    def moments(self, outline: Outline) -> tuple[Array, Array, Array]:
        """Bytes (L, K) of each layer while its gradients are reduced, it is gathered, fetched."""

    def least_s(self, outline: Outline) -> float:
        """A time that no assignment goes below."""


class Prices:
    """Costs by the number of tensor parts, and those of unlike layouts, made once each."""

    def __init__(
        self, graph: LayerGraph, cluster: Cluster, profile: Profile, workload: Workload
    ) -> None:
        self._given = graph, cluster, profile, workload
        self.graph = graph
        self.of = functools.cache(self._of)

    @functools.cached_property
    def unlike(self) -> UnlikeCosts:
        """Costs where layers are laid out unlike each other."""
        graph, cluster, profile, _ = self._given
        return UnlikeCosts(graph, profile, cluster, self.of)

    def pricing(self, draft: Draft) -> Pricing:
        """What prices a draft."""
        return self.of(draft.strategy.tp) if draft.is_alike else self.unlike

    def fitting(self, tp: int, cluster: Cluster) -> Fitting:
        """Rooms on another cluster."""
        return Fitting(self.of(tp).fitting.memory, self._given[2], cluster)

    def _of(self, tp: int) -> LayerCosts:
        graph, cluster, profile, workload = self._given
        memory = Memory(graph, workload, tp)
        fitting = Fitting(memory, profile, cluster)
        return LayerCosts(StepCost(DataCost(memory, profile, cluster)), fitting)
