"""All links alike."""

from __future__ import annotations

from .kind import Latency, NetworkKind, Rate, Way


class Uniform(NetworkKind, frozen=True, kw_only=True, tag="uniform", tag_field="kind"):
    """Every worker, and every server, has one link out and one in, all alike.

    Attributes:
        latency_s: Seconds until the first byte arrives.
        bytes_per_s: Of each link.
        loss: Probability that a message is lost and sent again.
        retry_s: Seconds after which what was lost is sent again.
        jitter_s: Mean of exponentially distributed seconds that are added to a message's latency.
    """

    latency_s: Latency = 1e-4
    bytes_per_s: Rate = 1.25e9

    def way(self, source: int, to: int, n: int) -> Way:
        """Over the links of both workers."""
        return Way(source, to, self.latency_s, self.bytes_per_s, self.bytes_per_s)
