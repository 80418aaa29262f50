"""The virtual machines: `[simulate]` of a spec."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..errors import Violation
from .compute import Compute, Constant
from .network import Network, Uniform


class Simulate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers there are on the virtual clock, how long they compute, what links cost.

    Attributes:
        workers: How many replicas train.
        compute: How long a gradient takes.
        network: What messages cost.
        seed: Fixes the seconds that are drawn; that of training unless given.
    """

    workers: Annotated[int, msgspec.Meta(ge=1)] = 8
    compute: Compute = Constant()
    network: Network = Uniform()
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None

    def check(self) -> list[Violation]:
        """Files can be read; links are those of workers that there are."""
        return [
            *self.compute.refused("simulate.compute"),
            *self.network.refused(self.workers, "simulate.network"),
        ]
