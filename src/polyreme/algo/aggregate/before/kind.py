"""What everything before an aggregator has: sums of rows take the place of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ....errors import undefined

if TYPE_CHECKING:
    from ..geometry import Array, Points


class BeforeKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """It mixes rows by weights that are found from their distances alone."""

    def rows(self, n: int) -> int:
        """How many rows n become."""
        return n

    def init(self) -> dict[str, Any]:
        """State before the first aggregate."""
        return {}

    def mixing(self, points: Points, f: int, state: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """Weights (m, n + 2) of rows, centre and origin that sum to 1, and the next state."""
        raise undefined(self, "mixing")
