"""Exchanges that bring nothing: one of several parts, measured or counted by itself."""

from __future__ import annotations

from typing import Any

from ..runtime.timing import Traffic


class Silent(Traffic):
    """Leaves tensors as they are; what a part computes and keeps does not depend on them."""

    def all_reduce(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def reduce_scatter(self, *_: Any, **__: Any) -> None:
        """Nothing."""
