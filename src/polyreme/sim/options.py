"""The virtual machines: `[simulate]` of a spec."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..algo.attack import Attack
from ..algo.attack.fitting import misnamed
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
        attack: What hostile workers do: one attack, or an array of several with a worker in one of
            them at most. `polyreme train` plays it where it is told to (`--attack`).
        seed: Fixes what is drawn of seconds, losses and crashes; that of training unless given.
    """

    workers: Annotated[int, msgspec.Meta(ge=1)] = 8
    compute: Compute = Constant()
    network: Network = Uniform()
    faults: tuple[Fault, ...] = ()
    attack: Attack | tuple[Attack, ...] = ()
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None

    @property
    def attacks(self) -> tuple[Attack, ...]:
        """All of them."""
        return self.attack if isinstance(self.attack, tuple) else (self.attack,)

    def check(self) -> list[Violation]:
        """Files can be read; links, faults and attacks are of workers that there are."""
        each = enumerate(self.faults)
        return [
            *self.compute.refused("simulate.compute"),
            *self.network.refused(self.workers, "simulate.network"),
            *(x for i, fault in each for x in fault.refused(self.workers, f"simulate.faults[{i}]")),
            *overlapping(self.faults, "simulate.faults"),
            *misnamed(self.attacks, self.workers, "simulate.attack"),
        ]
