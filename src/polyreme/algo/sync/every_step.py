"""Synchronous training: gradients are averaged at every step."""

from __future__ import annotations

import msgspec


class EveryStep(msgspec.Struct, frozen=True, kw_only=True, tag="EveryStep", tag_field="kind"):
    """All replicas average their gradients at every step (synchronous SGD)."""
