"""The majority of signs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from ...errors import Violation
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

    Attributes:
        byzantine: Workers that may be hostile or broken (f): a step goes on without as many whose
            gradients are not finite.
    """

    byzantine: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def bears(self) -> int:
        """As many as may be hostile."""
        return self.byzantine

    def refused(self, n: int) -> list[Violation]:
        """Half of the votes or more may be hostile."""
        if n > 2 * self.byzantine:
            return []
        most = (n - 1) // 2
        path, rule = "data_parallel.aggregate.byzantine", "is too large: a majority is n >= 2 f + 1"
        legal = f"{most} (or less, of {n} rows)" if most else f"0 (of {n} rows)"
        return [Violation(path=path, value=self.byzantine, rule=rule, legal=legal)]

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
