"""CHOCO-SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ...effects import Program
from . import copies
from .kind import MethodKind, State

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...feedback.kind import Turn
    from ...worker import Worker
    from ..graph.kind import GraphKind


class CHOCO(MethodKind, frozen=True, kw_only=True, tag="CHOCO", tag_field="kind"):
    """Copies c of models, known to neighbours, follow them through any compressor.

    x moves by gamma (sum_j W_ij c_j - c_i), and c_i by what was sent of x - c_i. Copies start at 0.
    Source: Koloskova, Stich and Jaggi 2019, algorithm 2 (ICML); Koloskova et al. 2020, algorithm 1
    (ICLR), with its authors' code.

    Attributes:
        gamma: How far models move towards the mean of copies; smaller for coarser compression.
        order: "ICML" sends before x moves, so that copies are new; "ICLR" sends after.
    """

    keeps_copies: ClassVar[bool] = True
    gamma: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    order: Literal["ICLR", "ICML"] = "ICLR"

    def init(
        self, params: torch.Tensor, me: Worker, graph: GraphKind, algorithm: DataParallel
    ) -> State:
        """Copies, all 0."""
        return copies.init(algorithm, params, params.new_zeros(params.shape), me, graph)

    def mix(
        self,
        x: torch.Tensor,
        state: State,
        me: Worker,
        turn: Turn,
        graph: GraphKind,
        algorithm: DataParallel,
    ) -> Program[tuple[torch.Tensor, State]]:
        """Send and move, or move and send."""

        def moved(x: torch.Tensor, state: State) -> torch.Tensor:
            away: torch.Tensor = copies.mean(state, me, graph, turn.step) - state["own"]
            return x + self.gamma * away

        if self.order == "ICLR":
            x = moved(x, state)
        lacks = x - state["own"]
        state = yield from copies.tell(lacks, state, me, graph, turn.step, algorithm)
        return (moved(x, state) if self.order == "ICML" else x), state
