"""No feedback."""

from __future__ import annotations

from .kind import FeedbackKind


class NoFeedback(FeedbackKind, frozen=True, kw_only=True, tag="None", tag_field="kind"):
    """What compression takes away is lost. Source: no paper; what others are compared with."""
