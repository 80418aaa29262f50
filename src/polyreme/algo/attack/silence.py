"""Nothing."""

from __future__ import annotations

from typing import ClassVar

from .kind import AttackKind


class Silence(AttackKind, frozen=True, kw_only=True, tag="Silence", tag_field="kind"):
    """Hostile workers compute, and send nothing.

    Where workers meet, a robust aggregate has no row of them and counts them among its
    `byzantine`; in a mean over all they count as zero. Where there are servers these never hear
    of them: syncs that wait for all workers present wait for good. Source: no paper.

    Attributes:
        workers: Who is hostile, counted from 0.
    """

    is_silent: ClassVar[bool] = True
