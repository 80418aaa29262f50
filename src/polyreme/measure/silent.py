"""Exchanges that bring nothing: one of several parts, measured or counted by itself."""

from __future__ import annotations

from typing import Any

from torch.distributed import Work

from ..runtime.timing import Traffic


class Silent(Traffic):
    """Leaves tensors as they are; what a part computes and keeps does not depend on them."""

    def all_reduce(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def reduce_scatter(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def start_sum(self, *_: Any, **__: Any) -> Work:
        """Nothing, which is over."""
        return _Over()

    def start_reduce_scatter(self, *_: Any, **__: Any) -> Work:
        """Nothing, which is over."""
        return _Over()


class _Over(Work):
    def wait(self, timeout: Any = None) -> bool:
        return True
