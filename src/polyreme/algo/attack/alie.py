"""A little is enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import Violation
from ..vector import mean
from .kind import Aim, AttackKind, State

if TYPE_CHECKING:
    import torch


class ALIE(AttackKind, frozen=True, kw_only=True, tag="ALIE", tag_field="kind"):
    """Hostile workers send mean - z times standard deviation of the honest, entry by entry.

    Without `z` it is the largest at which enough honest workers are farther from the mean: with s
    = floor(n / 2 + 1) - f of them that the hostile need, the normal quantile of (n - f - s) /
    (n - f).

    Source: Baruch et al. 2019, "A Little Is Enough: Circumventing Defenses For Distributed
    Learning" (preventing convergence).
    Differs: mean and deviation are of all honest workers, not of the hostile ones' own gradients.

    Attributes:
        workers: Who is hostile, counted from 0.
        z: Deviations from the mean; from the numbers of workers unless given.
    """

    sees: ClassVar[bool] = True
    z: Annotated[float, msgspec.Meta(ge=0, examples=[1.0])] | None = None

    def refused(self, n: int, path: str) -> list[Violation]:
        """Numbers of workers that give no z."""
        found = super().refused(n, path)
        if self.z is None and not found and not 0 < self._share(n) < 1:
            f = len(self.workers)
            rule = f"is not given, and {f} hostile of {n} workers give none: n >= 3, f <= n / 2"
            found.append(Violation(path=f"{path}.z", value=None, rule=rule, legal="1.0"))
        return found

    def deviations(self, n: int) -> float:
        """z, with n workers."""
        return NormalDist().inv_cdf(self._share(n)) if self.z is None else self.z

    def _share(self, n: int) -> float:
        f = len(self.workers)
        needed = n // 2 + 1 - f
        return (n - f - needed) / (n - f) if n > f else math.nan

    def made(
        self, honest: Mapping[int, torch.Tensor], state: State, aim: Aim
    ) -> tuple[torch.Tensor, State]:
        """The mean, z deviations below."""
        middle, deviation = spread(honest)
        return middle - deviation * self.deviations(aim.n), state


def spread(honest: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation (over n, not n - 1) of each entry."""
    middle = mean(honest.values())
    squares = middle.new_zeros(middle.shape)
    for row in honest.values():
        squares += (row - middle).square()
    return middle, (squares / len(honest)).sqrt()
