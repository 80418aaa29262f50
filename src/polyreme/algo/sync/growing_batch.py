"""Batches that grow as training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from .every_step import EveryStep
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class GrowingBatch(EveryStep, frozen=True, kw_only=True, tag="GrowingBatch", tag_field="kind"):
    """A step averages ever more batches of each worker, so that exchanges become rare (CR-PSGD).

    Step t (from 0) takes floor(growth^t first) batches, by their labels, and at most `at_most`.
    One that is not finite has all workers skip the step.

    Source: Yu and Jin 2019, "On the Computation and Communication Complexity of Parallel SGD with
    Dynamic Batch Sizes for Stochastic Non-Convex Optimization", algorithm 1 (CR-PSGD).
    Differs: sizes are whole batches, and bounded.

    Attributes:
        first: Batches of the first step.
        growth: What the number of batches is multiplied with after a step.
        at_most: Bound on the number of batches.
    """

    in_step: ClassVar[bool] = False
    first: Annotated[int, msgspec.Meta(ge=1)] = 1
    growth: Annotated[float, msgspec.Meta(ge=1)] = 1.01
    at_most: Annotated[int, msgspec.Meta(ge=1)] = 16

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """As at every step, and the batches taken so far."""
        return {**super().init(algorithm, params, me), "batch": 0}

    def n_batches(self, step: int) -> int:
        """Batches of a step counted from 0."""
        try:
            size = self.first * self.growth**step
        except OverflowError:
            return self.at_most
        return int(min(size, self.at_most))

    def batches(self, state: State) -> Sequence[int]:
        """The next ones."""
        first: int = state["batch"]
        return range(first, first + self.n_batches(state["step"]))

    def counted(self, state: State) -> State:
        """The state with a step and its batches more."""
        n = self.n_batches(state["step"])
        return {**super().counted(state), "batch": state["batch"] + n}
