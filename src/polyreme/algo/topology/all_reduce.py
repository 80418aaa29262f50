"""All replicas with all, through the backend's own collectives."""

from __future__ import annotations

from .cost import Cost
from .kind import TopologyKind


class AllReduce(TopologyKind, frozen=True, kw_only=True, tag="AllReduce", tag_field="kind"):
    """The backend's collectives over all replicas. Source: those of torch.distributed."""

    def cost(self, n: int, nbytes: int, *, adds: bool = True) -> Cost:
        """As a ring that gathers all messages, which is how both clocks count it."""
        return Cost(n - 1, (n - 1) * nbytes, n - 1, (n - 1) * nbytes)
