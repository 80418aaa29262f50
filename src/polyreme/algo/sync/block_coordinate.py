"""Block coordinate descent: a round is of some features, and exchanges their gradient alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from ...errors import ConfigError, Violation
from ..effects import Local, Program
from .kind import State
from .rounds import Rounds, Went

if TYPE_CHECKING:
    import torch

    from ..task import Task
    from ..worker import Worker

_MOST = 1 << 14  # blocks of which all know which two meet: bits of their square are exchanged


class BlockCoordinate(Rounds, frozen=True, kw_only=True, tag="BlockCoordinate", tag_field="kind"):
    """A round moves one block of features, down its gradient and by its penalty's prox.

    Workers keep their samples' predictions, so that a round exchanges as many numbers as the block
    has features. Feature j steps by the inverse of a bound on the loss's curvature over its block:
    the mean over samples of the loss's largest second derivative times x_j^2, times how many
    features of the block the sample has.

    Source: Richtarik and Takac 2014, "Iteration Complexity of Randomized Block-Coordinate Descent
    Methods for Minimizing a Composite Function", algorithm 2; in turn: Tseng and Yun 2009, "A
    Coordinate Gradient Descent Method for Nonsmooth Separable Minimization".

    Attributes:
        blocks: Blocks of features that follow each other, as equal as may be; no more than there
            are features.
        order: Whether blocks come in turn, or are drawn.
        independent: Whether a round is of all blocks of one colour: blocks that meet in a sample
            have different ones, which are found greedily. For features that exclude each other, and
            as many blocks as features.
    """

    blocks: Annotated[int, msgspec.Meta(ge=1)] = 16
    order: Literal["cyclic", "random"] = "cyclic"
    independent: bool = False

    by_feature: ClassVar[bool] = True

    @property
    def n_vectors(self) -> int:
        """Curvatures."""
        return 1

    def fits(self, n_entries: int) -> None:
        """Raise ConfigError where too many blocks are to be coloured."""
        if self.independent and min(self.blocks, n_entries) > _MOST:
            rule = "is more than can be coloured (data_parallel.sync.independent)"
            legal = f"up to {_MOST} (or independent = false)"
            path = "data_parallel.sync.blocks"
            raise ConfigError([Violation(path=path, value=self.blocks, rule=rule, legal=legal)])

    def own(self, params: torch.Tensor, me: Worker) -> State:
        """Predictions, their loss, curvatures, colours, all samples, and of how many workers."""
        import torch

        n = 0 if me.task is None else me.task.n_own
        return {
            "margins": params.new_zeros(n),
            "loss": 0.0,
            "curvatures": params.new_zeros(len(params)),
            "colours": torch.arange(min(self.blocks, len(params))),
            "n": 0.0,
            "workers": 0,
        }

    def went(self, state: State, me: Worker) -> Program[Went]:
        """The gradient of the blocks whose turn it is, and their step."""
        import torch

        task, w = me.task, state["params"]
        assert task is not None
        if state["workers"] != me.n:
            state = {**state, **(yield from self.begun(w, task)), "workers": me.n}
        margins, colours = state["margins"], state["colours"]
        now = self.turn(state["step"], int(colours.max()) + 1 if len(colours) else 1, me)
        block = _block(len(w), len(colours))
        features = torch.nonzero(colours[block] == now).flatten()
        work = task.batches(task.n_touched(features))
        gradient = yield Local(work=partial(task.partial, margins, features), batches=work)
        (gradient,) = yield from self.summed(gradient)
        gradient = gradient / state["n"]
        bound = state["curvatures"][features]
        eta = torch.where(bound > 0, 1 / bound, 1.0)
        before = w[features]
        u = before - eta * gradient
        u = u.sign() * (u.abs() - eta * task.l1).clamp(min=0.0) / (1 + eta * task.l2)
        shifted = partial(task.shifted, margins, features, u - before)
        margins, change = yield Local(work=shifted, batches=work)
        return Went(
            params=w.index_copy(0, features, u),
            changed={
                "margins": margins,
                "loss": state["loss"] + change,
                "curvatures": state["curvatures"],
                "colours": colours,
                "n": state["n"],
                "workers": me.n,
            },
            loss=state["loss"],
            grad_norm=float(gradient.norm()),
        )

    def turn(self, step: int, n: int, me: Worker) -> int:
        """The colour of a round, of n."""
        import torch

        if self.order == "cyclic":
            return step % n
        return int(torch.randint(n, (1,), generator=me.draw(step).shared()))

    def begun(self, w: torch.Tensor, task: Task) -> Program[State]:
        """Predictions at a model, and what the data say of blocks."""
        import torch

        n_blocks = min(self.blocks, len(w))
        block, whole = _block(len(w), n_blocks), task.batches(task.n_own)
        margins, loss = yield Local(work=partial(task.margins, w), batches=whole)
        bounds = yield Local(work=partial(task.curvatures, block), batches=whole)
        bounds, own = yield from self.summed(bounds, w.new_tensor([task.n_own]))
        n, colours = float(own), torch.arange(n_blocks)
        if self.independent:
            met = yield Local(work=partial(task.meetings, block, n_blocks), batches=whole)
            colours = yield from self.joined(met, partial(_coloured, n_blocks=n_blocks))
        found = {"margins": margins, "loss": loss, "curvatures": bounds / n}
        return {**found, "colours": colours, "n": n}


def _block(n_features: int, n_blocks: int) -> torch.Tensor:
    """Each feature's block."""
    import torch

    return torch.arange(n_features) * n_blocks // max(1, n_features)


def _coloured(met: Sequence[torch.Tensor], n_blocks: int) -> torch.Tensor:
    """A colour for each block, from the bits of which two meet at any worker.

    Those that meet most others first, each takes the least that none it meets has.
    Source: Welsh and Powell 1967.
    """
    import numpy as np
    import torch

    bits = np.bitwise_or.reduce([each.numpy() for each in met])
    meets = np.unpackbits(bits, count=n_blocks * n_blocks).reshape(n_blocks, n_blocks).astype(bool)
    colours = np.full(n_blocks, -1)
    for block in np.argsort(-meets.sum(1), kind="stable"):
        taken = np.zeros(n_blocks + 1, bool)
        taken[colours[meets[block]]] = True  # of those without one yet: the last entry
        colours[block] = int(np.argmin(taken[:n_blocks]))
    return torch.from_numpy(colours)
