"""What is known of an optimum from below, where a dual point has to be made: kept over rounds.

Any dual point bounds the optimum from below for good, so the best bound is kept; and slopes at the
last models are, as mixtures of them are better points than the last alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..task import Sum
from .kind import State

if TYPE_CHECKING:
    import torch

_EARLIER = 5


def begun(params: torch.Tensor, task: Sum | None) -> State:
    """Nothing: no bound, and gradients [K, D] and slopes [K, N] of 0 models.

    `of` is the sum that it all is of; it is empty where slopes are a dual point as they are.
    """
    points, n = (_EARLIER, task.n_own) if task is not None and task.shrinks else (0, 0)
    return {
        "lower": -math.inf,
        "of": 0,
        "earlier": 0,
        "gradients": params.new_zeros(points, len(params) if points else 0),
        "slopes": params.new_zeros(points, n),
    }


@dataclass(frozen=True, kw_only=True)
class Lower:
    """The best bound so far, and gradients [K, D] and slopes [K, N] at models, the last one first.

    `of` is the number of the sum that they are of.
    """

    lower: float
    of: int
    earlier: int
    gradients: torch.Tensor
    slopes: torch.Tensor

    @staticmethod
    def kept(state: State) -> Lower:
        """What a state has of it."""
        return Lower(**{name: state[name] for name in Lower.__dataclass_fields__})

    def anew(self, of: int) -> Lower:
        """Nothing, of another sum."""
        return Lower(
            lower=-math.inf, of=of, earlier=0, gradients=self.gradients, slopes=self.slopes
        )

    def mixed(self, weights: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        """A mixture of this worker's slopes [N] at a model and at earlier ones."""
        return weights[0] * slopes + weights[1:] @ self.slopes[: self.earlier]

    def after(self, heights: Iterable[float], z: torch.Tensor, slopes: torch.Tensor) -> State:
        """With the best of some bounds, and with the gradient and slopes at one more model."""
        import torch

        return {
            "lower": max([self.lower, *(height for height in heights if math.isfinite(height))]),
            "of": self.of,
            "earlier": min(_EARLIER, self.earlier + 1),
            "gradients": torch.cat([z[None], self.gradients[:-1]]),
            "slopes": torch.cat([slopes[None], self.slopes[:-1]]),
        }
