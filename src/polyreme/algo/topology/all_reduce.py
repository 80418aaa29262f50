"""All replicas with all, through the backend's own all-reduce."""

from __future__ import annotations

import msgspec


class AllReduce(msgspec.Struct, frozen=True, kw_only=True, tag="AllReduce", tag_field="kind"):
    """The backend's all-reduce over all replicas."""
