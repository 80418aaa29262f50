"""Models mixed with those of neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import Violation
from ..effects import Program
from ..packet import Message
from .cost import Cost
from .graph import Graph
from .graph.kind import ever
from .graph.ring import RingGraph
from .kind import State, TopologyKind
from .method import Method
from .method.d_psgd import DPSGD

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..feedback.kind import Turn
    from ..worker import Worker


class Gossip(TopologyKind, frozen=True, kw_only=True, tag="Gossip", tag_field="kind"):
    """Each worker steps along its own gradient and mixes its model with its neighbours'.

    What is compressed is what the method sends of models; gradients stay with their worker, so
    feedback has nothing to add, and momentum that it owns is each worker's own; so is what is
    aggregated. Models are mixed by the graph's weights.

    Source: Boyd et al. 2006, "Randomized Gossip Algorithms" (mixing); Lian et al. 2017 (training).

    Attributes:
        graph: Who takes how much of whom.
        method: What is sent, and how it is mixed in.
    """

    exact: ClassVar[bool] = False
    graph: Graph = RingGraph()
    method: Method = DPSGD()

    def refused(self, n: int, algorithm: DataParallel) -> list[Violation]:
        """Weights must mix models."""
        return self.graph.refused(n, columns_only=self.method.columns_only)

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """The method's state."""
        return self.method.init(params, me, self.graph, algorithm)

    def combine(
        self, message: Message, function: Callable[[Sequence[Message]], Any], me: Worker
    ) -> Program[Any]:
        """Nothing is the same on all workers under gossip; a sync that asks does not know of it."""
        raise NotImplementedError("gossip mixes models (mix), it combines no messages")

    def mix(
        self, x: torch.Tensor, state: State, me: Worker, turn: Turn, algorithm: DataParallel
    ) -> Program[tuple[torch.Tensor, State]]:
        """As the method does, over the step's weights."""
        return (yield from self.method.mix(x, state, me, turn, self.graph, algorithm))

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """A message to each neighbour: of the first step, or of any where copies are kept."""
        takes = ever(self.graph, n) if self.method.keeps_copies else self.graph.weights(n, 0) != 0
        takes = takes.clone()
        takes.fill_diagonal_(fill_value=False)
        most = int(takes.sum(0).max())
        return Cost(min(most, 1), most * nbytes, most, nbytes * min(most, 1))
