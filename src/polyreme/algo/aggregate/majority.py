"""The majority of signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .kind import AggregatorKind, State

if TYPE_CHECKING:
    import torch


class MajorityVote(AggregatorKind, frozen=True, kw_only=True, tag="MajorityVote", tag_field="kind"):
    """Each worker has a vote on each entry's sign: what comes out is -1, 0 or 1.

    With Sign as the compressor and SGD as the rule this is signSGD with majority vote. As many
    for plus as for minus give 0; an entry that is 0 or NaN is no vote. Where ways are exchanged
    instead of gradients (LocalSteps), each entry goes a way of length 1: DiLoCo's outer rate
    scales it.

    Source: Bernstein et al. 2018, "signSGD: Compressed Optimisation for Non-Convex Problems",
    algorithm 3; Bernstein et al. 2019, "signSGD with Majority Vote is Communication Efficient and
    Fault Tolerant".
    """

    @property
    def by_entry(self) -> bool:
        """It does."""
        return True

    def combine(
        self, rows: Sequence[torch.Tensor], state: State
    ) -> tuple[torch.Tensor, State, tuple[int, ...]]:
        """The sign of the sum of signs."""
        import torch

        votes = torch.zeros(rows[0].shape, dtype=torch.int32, device=rows[0].device)
        for row in rows:
            votes += (row > 0).int() - (row < 0).int()
        return votes.sign().to(rows[0].dtype), state, ()
