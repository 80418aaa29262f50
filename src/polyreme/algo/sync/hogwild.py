"""Hogwild: asynchronous SGD of workers that share memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from ...errors import Violation
from ..effects import Split, settled
from ..push import Push
from .asgd import ASGD
from .coming_alone import undressed
from .kind import State

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class Hogwild(ASGD, frozen=True, kw_only=True, tag="Hogwild", tag_field="kind"):
    """Asynchronous SGD with parameters in memory that workers share, read and written unlocked.

    In processes of one host workers change the memory themselves, entry by entry, and entries that
    a step leaves as they are they do not touch; what the rule keeps lies there too. On the virtual
    clock reads and writes take no time, and no bytes of any link. What is modelled of it is that
    gradients are of parameters that others changed meanwhile, by when they end; not modelled are
    updates that overlap (each is whole before the next), torn reads, and that writes to the same
    entries slow each other down.

    Source: Niu, Recht, Re and Wright 2011, "Hogwild!: A Lock-Free Approach to Parallelizing
    Stochastic Gradient Descent", algorithm 1.
    Differs: a gradient of several samples is one update, and any rule may make it.

    Attributes:
        servers: 1, who keeps the list of updates.
        ahead: 0, as it has no pushes that travel.
    """

    not_ahead: ClassVar[str] = "has no pushes that travel"
    whole_answers: ClassVar[str] = "sends nothing over a link"
    in_memory: ClassVar[bool] = True
    one_server: ClassVar[str] = "cuts parameters, and all share them in one memory"

    def machine(self, player: int, n: int) -> int:
        """All are on one."""
        return 0

    def wants(self, algorithm: DataParallel) -> list[Violation]:
        """Nothing travels that could be compressed."""
        return undressed("Hogwild", "sends nothing over a link", algorithm)

    def change(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Split[tuple[torch.Tensor, State]]:
        """What a push adds to the parameters, and the next state of the rule."""
        (found,) = push.vectors
        rate = algorithm.rule.at_delay(lr, state["version"] - push.version, me.n)
        moved = algorithm.rule.update(
            found, state["rule"], state["params"], lr=rate, layout=me.layout
        )
        return (yield from settled(moved))

    def applied(
        self, algorithm: DataParallel, state: State, push: Push, lr: float, me: Worker
    ) -> Split[State]:
        """A step of the rule."""
        delta, rule = yield from self.change(algorithm, state, push, lr, me)
        return {"params": state["params"] + delta, "rule": rule}
