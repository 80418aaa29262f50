"""What links cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec


class Network(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every worker has one link in and one out, all alike.

    Attributes:
        latency_s: Seconds from the end of sending to the arrival.
        bytes_per_s: Of each link.
    """

    latency_s: Annotated[float, msgspec.Meta(ge=0)] = 1e-4
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] = 1.25e9

    def sending_s(self, n_bytes: int) -> float:
        """Seconds that a message takes up a link."""
        return n_bytes / self.bytes_per_s

    def gathering_s(self, sizes: Sequence[int]) -> float:
        """Seconds until all have what all give: a ring in which each passes on n - 1 parts."""
        if len(sizes) < 2:
            return 0.0
        slowest = sum(sizes) - min(sizes)
        return (len(sizes) - 1) * self.latency_s + slowest / self.bytes_per_s
