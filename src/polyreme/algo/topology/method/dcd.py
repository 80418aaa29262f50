"""Difference and extrapolation compression."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...effects import Program
from . import copies
from .kind import MethodKind, State

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...feedback.kind import Turn
    from ...worker import Worker
    from ..graph.kind import GraphKind


class DCD(MethodKind, frozen=True, kw_only=True, tag="DCD", tag_field="kind"):
    """Differences are sent: a worker's model is the copy that its neighbours have of it.

    Source: Tang et al. 2018, "Communication Compression for Decentralized Training", algorithm 1
    (for unbiased compressors that are not too coarse). Without loss it is D-PSGD, step beside.
    """

    keeps_copies: ClassVar[bool] = True

    def init(
        self, params: torch.Tensor, me: Worker, graph: GraphKind, algorithm: DataParallel
    ) -> State:
        """Copies of the common first model."""
        return copies.init(algorithm, params, params, me, graph)

    def mix(
        self,
        x: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        graph: GraphKind,
        algorithm: DataParallel,
    ) -> Program[tuple[torch.Tensor, State]]:
        """The weighted mean of copies and one's step, as far as it can be sent."""
        aim = x - state["own"] + copies.mean(state, me, graph, turn.step)
        lacks = aim - state["own"]
        state = yield from copies.tell(lacks, state, me, graph, turn.step, algorithm)
        return state["own"], state


class ECD(MethodKind, frozen=True, kw_only=True, tag="ECD", tag_field="kind"):
    """Extrapolations are sent, from which neighbours keep ever better estimates.

    Source: Tang et al. 2018, "Communication Compression for Decentralized Training", algorithm 2
    (for unbiased compressors): z = (1 - t/2) x_t + (t/2) x_{t+1} is sent, the estimate becomes
    (1 - 2/t) of itself and 2/t of what was sent. Without loss it is D-PSGD, step beside.
    """

    keeps_copies: ClassVar[bool] = True

    def init(
        self, params: torch.Tensor, me: Worker, graph: GraphKind, algorithm: DataParallel
    ) -> State:
        """Estimates of the common first model, and exchanges done."""
        state = copies.init(algorithm, params, params, me, graph)
        return {**state, "mixed": params, "t": 0}

    def mix(
        self,
        x: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        graph: GraphKind,
        algorithm: DataParallel,
    ) -> Program[tuple[torch.Tensor, State]]:
        """The weighted mean of estimates and one's step."""
        t, before = state["t"] + 1, state["mixed"]
        mixed = x - before + copies.mean(state, me, graph, turn.step)
        ahead = (1 - t / 2) * before + t / 2 * mixed
        state = yield from copies.tell(
            ahead, state, me, graph, turn.step, algorithm, keep=1 - 2 / t, add=2 / t
        )
        return mixed, {**state, "mixed": mixed, "t": t}
