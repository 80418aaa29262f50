"""The virtual machines: `[simulate]` of a spec."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..errors import Violation
from .compute import Compute, Constant
from .faults import Fault
from .faults.overlap import overlapping
from .network import Network, Uniform


class Simulate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many workers there are on the virtual clock, how long they compute, what links cost.

    Times of faults count from where the clock began, which it does anew when a run is resumed.

    Attributes:
        workers: How many replicas train.
        compute: How long a gradient takes.
        network: What messages cost.
        faults: What befalls workers, under syncs with servers.
        seed: Fixes what is drawn of seconds, losses and crashes; that of training unless given.
    """

    workers: Annotated[int, msgspec.Meta(ge=1)] = 8
    compute: Compute = Constant()
    network: Network = Uniform()
    faults: tuple[Fault, ...] = ()
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None

    def check(self) -> list[Violation]:
        """Files can be read; links and faults are of workers that there are, one at a time."""
        each = enumerate(self.faults)
        return [
            *self.compute.refused("simulate.compute"),
            *self.network.refused(self.workers, "simulate.network"),
            *(x for i, fault in each for x in fault.refused(self.workers, f"simulate.faults[{i}]")),
            *overlapping(self.faults, "simulate.faults"),
        ]
