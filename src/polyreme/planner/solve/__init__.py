"""Solvers: one file each, one signature.

`grid` chooses among whole drafts. `exact` and `miqp` choose stages and strategies of an `Instance`;
the planner does not ask them yet.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ...graph.layer import LayerGraph
from ..cost.data import StepTime
from ..draft import Draft
from ..room import Room
from ..space import Space


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that was looked at: its time, and how it fits the device that is tightest."""

    draft: Draft
    time: StepTime
    room: Room


class Solution(msgspec.Struct, frozen=True, kw_only=True):
    """What a solver found: candidates that fit, best first, and then those that do not.

    `bound_s` is a time that no plan of the space can beat; `proved` says that the best plan
    reaches it.
    """

    candidates: tuple[Candidate, ...]
    objective_s: float
    bound_s: float
    proved: bool


class Cost(Protocol):
    """Seconds of a step."""

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step of a draft."""


class Fit(Protocol):
    """Whether a draft fits the devices."""

    def __call__(self, draft: Draft) -> Room:
        """Bytes that the tightest device has and needs."""


class Solver(Protocol):
    """Finds the plan that takes least time and fits; pure."""

    def __call__(
        self, graph: LayerGraph, space: Space, cost: Cost, memory: Fit, deadline_s: float
    ) -> Solution:
        """The best plan found within `deadline_s` seconds.

        A solution whose first candidate does not fit says that nothing fits.
        """
