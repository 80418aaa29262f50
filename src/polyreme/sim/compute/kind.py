"""What every model of computing has: the seconds of one gradient."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...errors import Violation, undefined

Positive = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ComputeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a gradient are a function of seed, worker and batch: nothing is carried.

    A gradient takes as long whatever the number of its samples; nothing else takes time.
    """

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """Seconds of one gradient of worker `rank` of n."""
        raise undefined(self, "gradient_s")

    def refused(self, path: str) -> list[Violation]:
        """What is wrong beyond types; `path` is where the model stands in the spec."""
        return []
