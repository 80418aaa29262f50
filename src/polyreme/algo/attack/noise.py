"""Random numbers on what is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from ..effects import Split
from ..norm import length
from .kind import AttackKind, Made, State

if TYPE_CHECKING:
    import torch

    from ..draw import Draw


class Noise(AttackKind, frozen=True, kw_only=True, tag="Noise", tag_field="kind"):
    """Hostile workers add normal random numbers to what they send.

    Source: Yang and Li 2021, "BASGD: Buffered Asynchronous SGD for Byzantine Learning", random
    disturbance attack (`relative`, sigma 0.2); Xie et al. 2018, "Generalized Byzantine-Tolerant
    SGD", Gaussian attack.

    Attributes:
        workers: Who is hostile, counted from 0.
        sigma: Standard deviation of each number.
        relative: Whether sigma counts in lengths of the vector.
    """

    sigma: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    relative: bool = False

    def sent(self, vector: torch.Tensor, state: State, draw: Draw) -> Split[Made]:
        """The vector and this worker's numbers."""
        import torch

        wide = torch.float64 if vector.dtype == torch.float64 else torch.float32
        numbers = torch.randn(vector.shape, dtype=wide, generator=draw.own())
        sigma = self.sigma
        if self.relative:
            sigma *= yield from length(vector)
        return vector + (numbers * sigma).to(vector.device, vector.dtype), state
