"""One honest worker, as if it were several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from ..effects import Split, SumShards
from ..norm import normalised
from ..vector import mean
from .kind import Aim, AttackKind, Made, Rank, State

if TYPE_CHECKING:
    import torch


class Mimic(AttackKind, frozen=True, kw_only=True, tag="Mimic", tag_field="kind"):
    """Hostile workers send what one honest worker sends, so that it counts several times.

    Without `worker` it is the one that stands out in the direction z in which honest workers differ
    most. In each of `warm_up` steps t = 0, 1, ... with the honest vectors x_i
        m = t/(t+1) m + 1/(t+1) mean(x),  z = t/(t+1) z + 1/(t+1) sum of (x_i - m) <x_i - m, z>
    (z at length 1, drawn at first); then the worker with the largest |sum over t of <x_i - m, z>|
    is copied for good, and until then the one with the largest so far. One that is absent is
    stood in for by the first that is there.

    Source: Karimireddy, He and Jaggi 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via
    Bucketing" (z by Oja's rule).

    Attributes:
        workers: Who is hostile, counted from 0.
        worker: Whom they copy; chosen as above unless given.
        warm_up: Steps after which the choice is made.
    """

    sees: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    worker: Annotated[Rank, msgspec.Meta(examples=[0])] | None = None
    warm_up: Annotated[int, msgspec.Meta(ge=1)] = 50

    def refused(self, n: int, path: str) -> list[Violation]:
        """An honest worker that is not there, or not honest."""
        return [*super().refused(n, path), *self._copied(n, path)]

    def _copied(self, n: int, path: str) -> Iterator[Violation]:
        if self.worker is None or (self.worker < n and self.worker not in self.workers):
            return
        honest = [str(rank) for rank in range(n) if rank not in self.workers]
        rule = f"is not among the {n} workers, or hostile itself"
        legal = ", ".join(honest[:8]) or "leave it out"
        yield Violation(path=f"{path}.worker", value=self.worker, rule=rule, legal=legal)

    def init(self, like: torch.Tensor, n: int) -> State:
        """Nothing seen; nobody chosen."""
        import torch

        if self.worker is not None:
            return {}
        return {
            "mean": like.new_zeros(like.shape),
            "direction": like.new_zeros(like.shape),
            "sums": torch.zeros(n, dtype=torch.float64),
            "seen": 0,
        }

    def made(self, honest: Mapping[int, torch.Tensor], state: State, aim: Aim) -> Split[Made]:
        """A copy of the worker's."""
        if self.worker is not None:
            return _copy(honest, self.worker), state
        if state["seen"] < self.warm_up:
            state = yield from self._watched(honest, state, aim)
        sums = state["sums"].abs()
        chosen = max(range(aim.n), key=lambda rank: float(sums[rank]))
        return _copy(honest, chosen), state

    def _watched(self, honest: Mapping[int, torch.Tensor], state: State, aim: Aim) -> Split[State]:
        """The state with a step more."""
        import torch

        t, direction = state["seen"], state["direction"]
        old = t / (t + 1)
        middle = state["mean"] * old + mean(honest.values()) * (1 - old)
        if not t:
            drawn = torch.randn(middle.shape, generator=aim.draw.shared(), dtype=torch.float64)
            direction = yield from normalised(drawn.to(middle.device, middle.dtype))
        apart = {rank: row - middle for rank, row in honest.items()}
        lengths = yield from _along(apart, direction)
        turned = direction * old
        for row, along in zip(apart.values(), lengths, strict=True):
            turned = turned + row * (along * (1 - old))
        direction = yield from normalised(turned)
        sums = state["sums"].clone()
        sums[list(honest)] += torch.tensor((yield from _along(apart, direction))).double()
        return {"mean": middle, "direction": direction, "sums": sums, "seen": t + 1}


def _along(rows: Mapping[int, torch.Tensor], direction: torch.Tensor) -> Split[list[float]]:
    """Inner products, over all parts of the replica."""
    import torch

    wide = direction.double()
    own = torch.stack([row.double() @ wide for row in rows.values()])
    found: list[float] = (yield SumShards(partial=own)).tolist()
    return found


def _copy(honest: Mapping[int, torch.Tensor], rank: int) -> torch.Tensor:
    return honest.get(rank, next(iter(honest.values()))).clone()
