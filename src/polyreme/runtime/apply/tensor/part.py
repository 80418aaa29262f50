"""This process's part among those that compute one layer together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...timing import Traffic


@dataclass(frozen=True, kw_only=True)
class Tp:
    """One of `degree` tensor parts, with the group in which their ranks follow each other.

    With `sp` the hidden between layers is this part's tokens of it.
    """

    rank: int
    degree: int
    group: Any  # dist.ProcessGroup
    traffic: Traffic
    sp: bool = False
