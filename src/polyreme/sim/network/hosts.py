"""Fast inside hosts, slow between them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .kind import Latency, NetworkKind, Rate, Way


class Hosts(NetworkKind, frozen=True, kw_only=True, tag="hosts", tag_field="kind"):
    """Workers share their host's one link out and one in; inside, each has links of its own.

    Messages inside a host and those between hosts are not in each other's way.

    Attributes:
        per_host: Consecutive workers of a host; the last host may have fewer.
        latency_s: Seconds until the first byte arrives, between hosts.
        bytes_per_s: Of each host's link.
        inside_latency_s: Seconds until the first byte arrives, inside a host.
        inside_bytes_per_s: Of each worker's link inside.
    """

    per_host: Annotated[int, msgspec.Meta(ge=1)] = 8
    latency_s: Latency = 1e-4
    bytes_per_s: Rate = 1.25e9
    inside_latency_s: Latency = 1e-5
    inside_bytes_per_s: Rate = 1e11

    def way(self, source: int, to: int, n: int) -> Way:
        """Over the workers' links, or over those of their hosts."""
        here, there = source // self.per_host, to // self.per_host
        if here == there:
            rate = self.inside_bytes_per_s
            return Way(source, to, self.inside_latency_s, rate, rate)
        return Way(n + here, n + there, self.latency_s, self.bytes_per_s, self.bytes_per_s)
