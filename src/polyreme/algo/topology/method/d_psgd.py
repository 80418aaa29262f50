"""Decentralised parallel SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from ...effects import Program
from ..graph.kind import shares
from . import said
from .kind import MethodKind, State

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...feedback.kind import Turn
    from ...worker import Worker
    from ..graph.kind import GraphKind


class DPSGD(MethodKind, frozen=True, kw_only=True, tag="D-PSGD", tag_field="kind"):
    """Each worker takes the weighted mean of its own model and its neighbours'.

    Source: Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?",
    algorithm 1 (step beside); Cattivelli and Sayed 2010, "Diffusion LMS" (step first).
    Differs: neighbours' models are what their packets decode to, which under lossy compression
    does not converge (DCD, ECD and CHOCO do).

    Attributes:
        order: "step first" mixes models after the step: W (x - lr g). "step beside" mixes those
            from before it, and the step is added: W x - lr g.
    """

    order: Literal["step first", "step beside"] = "step first"

    def init(
        self, params: torch.Tensor, me: Worker, graph: GraphKind, algorithm: DataParallel
    ) -> State:
        """Compressors; the last mixed model, if the step is beside it."""
        state: State = {"compress": said.init(algorithm, params, me)}
        return state if self.order == "step first" else {**state, "mixed": params}

    def mix(
        self,
        x: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        graph: GraphKind,
        algorithm: DataParallel,
    ) -> Program[tuple[torch.Tensor, State]]:
        """The weighted mean, summed in order of workers."""
        weights = shares(graph, me.n, turn.step, me.seed)
        before = x if self.order == "step first" else state["mixed"]
        message, compress = said.packed(algorithm, before, state["compress"], me, turn.step)
        heard = yield from said.told(message, weights, me)
        share = weights[me.rank].tolist()
        mixed = before * share[me.rank]
        for source, each in heard.items():
            mixed = mixed + said.unpacked(each) * share[source]
        if self.order == "step first":
            return mixed, {"compress": compress}
        mixed = mixed + (x - before)
        return mixed, {"compress": compress, "mixed": mixed}
