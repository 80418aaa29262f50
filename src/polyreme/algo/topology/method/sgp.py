"""Stochastic gradient push."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ... import exchange
from ...effects import Program
from ...packet import Message
from ..graph.kind import shares
from ..passing import joined
from . import said
from .kind import MethodKind, State

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...feedback.kind import Turn
    from ...worker import Worker
    from ..graph.kind import GraphKind


class SGP(MethodKind, frozen=True, kw_only=True, tag="SGP", tag_field="kind"):
    """Push-sum: sums x and weights w travel, the model is x / w.

    Works where only columns of the weights sum to 1. The sum of w over workers stays n.
    Source: Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning",
    algorithm 1.
    Differs: the worker's model is z = x / w, of which x = w z comes back; the share that a worker
    gives is taken by its receiver, who knows the weights too.
    """

    columns_only: ClassVar[bool] = True

    def init(
        self, params: torch.Tensor, me: Worker, graph: GraphKind, algorithm: DataParallel
    ) -> State:
        """Weight 1 and the last mixed model."""
        return {"compress": said.init(algorithm, params, me), "weight": 1.0, "mixed": params}

    def mix(
        self,
        x: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        graph: GraphKind,
        algorithm: DataParallel,
    ) -> Program[tuple[torch.Tensor, State]]:
        """The sum of shares of x over that of shares of w."""
        import torch

        weights = shares(graph, me.n, turn.step, me.seed)
        # The step at z moves the sum: w z + (z' - z).
        total = x + (state["weight"] - 1.0) * state["mixed"]
        message, compress = said.packed(algorithm, total, state["compress"], me, turn.step)
        scalar = exchange.dense([x.new_tensor([state["weight"]], dtype=torch.float64)])
        heard = yield from said.told(joined([message, scalar]), weights, me)
        share = weights[me.rank].tolist()
        total, weight = total * share[me.rank], state["weight"] * share[me.rank]
        for source, each in heard.items():
            total = total + said.unpacked(Message(packets=each.packets[:-1])) * share[source]
            weight += float(each.packets[-1].decode()) * share[source]
        mixed = total / weight
        return mixed, {"compress": compress, "weight": weight, "mixed": mixed}
