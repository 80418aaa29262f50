"""Fast inside hosts, slow between them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...errors import Violation
from .kind import Latency, NetworkKind, Rate, Way


class Hosts(NetworkKind, frozen=True, kw_only=True, tag="hosts", tag_field="kind"):
    """Workers share their host's one link out and one in; inside, each has links of its own.

    Messages inside a host and those between hosts are not in each other's way. Servers have a host
    each of their own, or are all on one of the workers'.

    Attributes:
        per_host: Consecutive workers of a host; the last host may have fewer.
        latency_s: Seconds until the first byte arrives, between hosts.
        bytes_per_s: Of each host's link.
        inside_latency_s: Seconds until the first byte arrives, inside a host.
        inside_bytes_per_s: Of each worker's link inside.
        server_host: The host of workers, counted from 0, that servers are on.
        loss: Probability that a message is lost and sent again.
        retry_s: Seconds after which what was lost is sent again.
        jitter_s: Mean of exponentially distributed seconds that are added to a message's latency.
    """

    per_host: Annotated[int, msgspec.Meta(ge=1)] = 8
    latency_s: Latency = 1e-4
    bytes_per_s: Rate = 1.25e9
    inside_latency_s: Latency = 1e-5
    inside_bytes_per_s: Rate = 1e11
    server_host: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def way(self, source: int, to: int, n: int) -> Way:
        """Over the players' links, or over those of their hosts, which are numbered below 0."""
        here, there = self._host(source, n), self._host(to, n)
        if here == there:
            rate = self.inside_bytes_per_s
            return Way(source, to, self.inside_latency_s, rate, rate)
        return Way(-1 - here, -1 - there, self.latency_s, self.bytes_per_s, self.bytes_per_s)

    def _host(self, player: int, n: int) -> int:
        if player < n:
            return player // self.per_host
        if self.server_host is not None:
            return self.server_host
        return self._n_hosts(n) + player - n

    def _n_hosts(self, n: int) -> int:
        return -(-n // self.per_host)

    def refused(self, n: int, path: str) -> list[Violation]:
        """Servers are on a host that there is."""
        host, n_hosts = self.server_host, self._n_hosts(n)
        if host is None or host < n_hosts:
            return []
        rule = f"is not among the {n_hosts} hosts of {n} workers, which are counted from 0"
        legal = f"{n_hosts - 1} (or any integer >= 0 and <= {n_hosts - 1}, or leave it out)"
        return [Violation(path=f"{path}.server_host", value=host, rule=rule, legal=legal)]
