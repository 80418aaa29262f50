"""What ends a run before its last step: how good a model is known to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A duality gap, and a largest entry of w - prox(w - z); one that is met is enough.

    See `task.Certificate`. What is not asked for is None.
    """

    gap: float | None = None
    gradient_norm: float | None = None

    def met(self, gap: float | None, gradient: float | None) -> bool:
        """Whether a certificate suffices, of which what is not known is None."""
        return _within(gap, self.gap) or _within(gradient, self.gradient_norm)


def _within(known: float | None, wanted: float | None) -> bool:
    return known is not None and wanted is not None and known <= wanted
