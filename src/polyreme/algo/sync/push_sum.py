"""Asynchronous push-sum: shares of models are pushed, and nobody waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from ..effects import Program
from ..topology.graph import Graph
from ..topology.graph.exponential import Exponential
from ..topology.graph.kind import shares
from .kept import Kept, Said, tell, there
from .kind import State
from .peers import picked

if TYPE_CHECKING:
    import torch

    from ..worker import Worker


class AsyncPushSum(Kept, frozen=True, kw_only=True, tag="AsyncPushSum", tag_field="kind"):
    """A keeper pushes half of its sum x and weight w to a neighbour after each step of its worker.

    The model is x / w; the rule's step is added to x. What comes is added when it comes. So
    columns sum to 1, and weights to the number of workers with what is under way. The k-th push
    goes to one that takes of this worker at step k of the graph, drawn at random if several do.

    Source: Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning" (overlap
    SGP), without a bound on delays; Spiridonoff et al. 2020, "Robust Asynchronous Stochastic
    Gradient-Push".
    Differs: a keeper does not push what would leave it less than `least_weight`. A worker that
    takes many steps before anything comes would push nearly all that it has, and divide its steps
    by next to nothing. Messages are not lost here, so no running sums are sent.

    Attributes:
        graph: Who is whose neighbour.
        least_weight: What a push must leave of the weight; with at most half there is always one
            who may push.
    """

    graph: Graph = Exponential()
    least_weight: Annotated[float, msgspec.Meta(gt=0, le=0.5)] = 0.25

    def own(self) -> State:
        """The weight, and how many pushes there were."""
        return {"weight": 1.0, "pushes": 0}

    def model(self, state: State) -> torch.Tensor:
        """Of a keeper x / w; a worker's parameters as they are."""
        params: torch.Tensor = state["params"]
        return params / state["weight"] if "weight" in state else params

    def holding(self, state: State, model: torch.Tensor) -> State:
        """With the weight that it has."""
        return {**state, "params": model * state["weight"]}

    def whole(self, servers: Sequence[State], workers: Sequence[State] = ()) -> torch.Tensor:
        """The sum of x over that of w, of those that are there."""
        first, *others = there(servers)
        total = sum((state["params"].double() for state in others), first["params"].double())
        mean: torch.Tensor = total / sum(state["weight"] for state in (first, *others))
        return mean.to(first["params"].dtype)

    def reckoned(self, state: State) -> float:
        """Steps are shared as models are."""
        progress: float = state["progress"] / state["weight"]
        return progress

    def begun(self, state: State, me: Worker) -> Program[State]:
        """Half of all that it has to one that takes of it."""
        number, worker, weight = state["pushes"], me.rank - me.n, state["weight"] / 2
        takes = shares(self.graph, me.n, number, me.seed)[:, worker].tolist()
        others = [
            other
            for other, share in enumerate(takes)
            if share and other != worker and state["present"][str(other)]
        ]
        if weight < self.least_weight:
            return state
        after = {**state, "pushes": number + 1}
        if not others:
            return after
        params, progress = state["params"] / 2, state["progress"] / 2
        to = me.n + picked(others, number, me)
        yield from tell(to, (weight, progress), params)
        return {**after, "params": params, "progress": progress, "weight": weight}

    def heard(self, state: State, said: Said, me: Worker) -> Program[State]:
        """What came is added."""
        weight, progress = said.numbers
        return {
            **state,
            "params": state["params"] + said.vector,
            "progress": state["progress"] + progress,
            "weight": state["weight"] + weight,
            "version": state["version"] + 1,
        }
        yield  # a program that asks for nothing
