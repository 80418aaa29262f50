"""Hogwild: asynchronous SGD of workers that share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...errors import Violation
from .asgd import ASGD
from .coming_alone import undressed

if TYPE_CHECKING:
    from ..compose import DataParallel


class Hogwild(ASGD, frozen=True, kw_only=True, tag="Hogwild", tag_field="kind"):
    """Asynchronous SGD with parameters in memory that workers share, read and written unlocked.

    On the virtual clock reads and writes take no time, and no bytes of any link. What is modelled
    of it is that gradients are of parameters that others changed meanwhile, by when they end; not
    modelled are updates that overlap (each is whole before the next), torn reads, and that writes
    to the same entries slow each other down.

    Source: Recht et al. 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
    Descent".

    Attributes:
        servers: Pieces that parameters are in.
        ahead: 0, as it has no pushes that travel.
    """

    not_ahead: ClassVar[str] = "has no pushes that travel"
    whole_answers: ClassVar[str] = "sends nothing over a link"
    in_memory: ClassVar[bool] = True

    def machine(self, player: int, n: int) -> int:
        """All are on one."""
        return 0

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """Nothing travels that could be compressed."""
        return undressed("Hogwild", "sends nothing over a link", algorithm)
