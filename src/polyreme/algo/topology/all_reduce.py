"""All replicas with all, through the backend's own collectives."""

from __future__ import annotations

from .kind import TopologyKind


class AllReduce(TopologyKind, frozen=True, kw_only=True, tag="AllReduce", tag_field="kind"):
    """The backend's collectives over all replicas."""
