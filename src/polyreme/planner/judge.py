"""Drafts that were looked at, the best first: each played, tuned where that may decide."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from ..plan.ir import OFFLOADED
from ..plan.order import ORDERS, families
from .cost.data import StepTime
from .cost.exchange import usual
from .cost.pipeline import is_long
from .draft import Draft, describe_draft
from .prices import Prices
from .room import Room
from .space import SHARDED_LEVELS

TUNED_WITHIN = 0.15  # of the best time; tuning gains less
LEVELS = ("none", *SHARDED_LEVELS)
OFFLOADS = tuple(OFFLOADED)


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A draft that was looked at: its time, and how it fits the device that is tightest."""

    draft: Draft
    time: StepTime
    room: Room
    played: bool


class Judge:
    """Ranks drafts. After `end_s` those whose orders take long to list are left out.

    `whole` says that none was. `tell` hears how far it is.
    """

    def __init__(
        self,
        prices: Prices,
        top: int,
        end_s: float = math.inf,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.whole = True
        self._prices, self._top, self._end_s, self._tell = prices, top, end_s, tell
        self._n_played = 0

    def __call__(self, drafts: Iterable[Draft]) -> list[Candidate]:
        """Each once, with the time of its played step: those that fit by time, then the others.

        How they exchange is tuned where it may decide. Long steps are ranked by their orders'
        closed forms, and then played until the first of them are.
        """
        known: dict[str, Draft] = {}
        for draft in drafts:
            known.setdefault(f"{draft.pp} {draft.stages} {describe_draft(draft)}", draft)
        return self._ranked([self._seen(each) for each in known.values() if self._in_time(each)])

    def in_other_orders(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """With what is near the best in other orders, the nearest first."""
        more = [self._seen(each) for each in _reordered(candidates) if self._in_time(each)]
        return self._ranked([*candidates, *more])

    def _in_time(self, draft: Draft) -> bool:
        """Whether there is time to list the draft's order, if it is one that takes long."""
        if draft.order not in ORDERS or not ORDERS[draft.order].by_costs:
            return True
        in_time = time.monotonic() < self._end_s
        self.whole = self.whole and in_time
        return in_time

    def _seen(self, draft: Draft) -> Candidate:
        """A draft with the time of its step, by its closed form where it is long."""
        costs, late = self._prices.pricing(draft), is_long(draft)
        self._n_played += not late
        if self._tell is not None:
            self._tell(f"{self._n_played} orders of stages played, now {describe_draft(draft)}")
        return Candidate(
            draft=draft,
            time=(costs.cost.sketched if late else costs.cost)(usual(draft)),
            room=costs.fitting(draft),
            played=not late,
        )

    def _ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        found = sorted(candidates, key=_rank)
        least_s = found[0].time.step_s if found else 0.0
        for at, each in enumerate(found):
            near = each.room.fits and each.time.step_s <= (1 + TUNED_WITHIN) * least_s
            if near and not is_long(each.draft) and (at < self._top or self._in_time(each.draft)):
                found[at] = self._played(each)
        found.sort(key=_rank)
        while sketched := [at for at, each in enumerate(found[: self._top]) if _is_sketched(each)]:
            found[sketched[0]] = self._played(found[sketched[0]])
            found.sort(key=_rank)
        return found

    def _played(self, candidate: Candidate) -> Candidate:
        """With the time of its order on the clock, and its exchanges tuned."""
        if self._tell is not None:
            self._tell(f"tuning what is exchanged in {describe_draft(candidate.draft)}")
        step = self._prices.pricing(candidate.draft).cost(candidate.draft)
        return msgspec.structs.replace(candidate, time=step, played=True)


def _reordered(candidates: Sequence[Candidate]) -> Iterator[Draft]:
    """Those that fit and are near the best, in orders whose stages lie as theirs do."""
    near = [each for each in candidates if each.room.fits]
    for candidate in near:
        draft = candidate.draft
        if candidate.time.step_s > (1 + TUNED_WITHIN) * near[0].time.step_s or not draft.stages:
            continue
        for family in families():
            names = {order.name for order in family}
            for order in family if draft.order in names else ():
                if order.name != draft.order and not order.refused(draft.pp, draft.microbatches):
                    yield msgspec.structs.replace(draft, order=order.name)


def _is_sketched(candidate: Candidate) -> bool:
    """Whether it fits and was only judged by its order's closed form."""
    return candidate.room.fits and not candidate.played


def _rank(candidate: Candidate) -> tuple[bool, float, tuple[int, ...]]:
    """Those that fit by time (equal to 12 digits is equal), others by what lacks; the plainer."""
    draft = candidate.draft
    ways = set(draft.strategies.values())
    plainness = (
        draft.strategy.tp,
        draft.pp,
        len(ways),
        sum(OFFLOADS.index(each.offload) for each in ways),
        max(each.ep for each in ways),
        sum(each.recompute for each in draft.strategies.values()),
        draft.strategy.shard,
        draft.strategy.replica,
        max(LEVELS.index(each.level) for each in ways),
        draft.microbatches,
    )
    if candidate.room.fits:
        return False, float(f"{candidate.time.step_s:.12g}"), plainness
    return True, candidate.room.over_bytes, plainness
