"""Some links are slow."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...errors import Violation
from .kind import Latency, NetworkKind, Rate, Way


class SlowLinks(NetworkKind, frozen=True, kw_only=True, tag="slow_links", tag_field="kind"):
    """As uniform, but links of some workers have a fraction of the rate, out and in; no server's.

    Attributes:
        latency_s: Seconds until the first byte arrives.
        bytes_per_s: Of each link that is not slow.
        slow: Workers, counted from 0, whose links are slow.
        slow_factor: How many times longer a message takes up their links.
        loss: Probability that a message is lost and sent again.
        retry_s: Seconds after which what was lost is sent again.
        jitter_s: Mean of exponentially distributed seconds that are added to a message's latency.
    """

    latency_s: Latency = 1e-4
    bytes_per_s: Rate = 1.25e9
    slow: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = (0,)
    slow_factor: Annotated[float, msgspec.Meta(ge=1)] = 10.0

    def way(self, source: int, to: int, n: int) -> Way:
        """Over the links of both workers."""
        return Way(source, to, self.latency_s, self._rate(source), self._rate(to))

    def _rate(self, rank: int) -> float:
        return self.bytes_per_s / (self.slow_factor if rank in self.slow else 1.0)

    def refused(self, n: int, path: str) -> list[Violation]:
        """Slow are workers that there are."""
        if all(rank < n for rank in self.slow):
            return []
        rule = f"names a worker that is not among the {n}"
        legal = f"[0] (any of workers 0 to {n - 1})"
        value = list(self.slow)
        return [Violation(path=f"{path}.slow", value=value, rule=rule, legal=legal)]
