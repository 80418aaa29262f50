"""How gradients that are whole on each device are exchanged, where the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...plan.ir import BUCKET_BYTES
from ..draft import BUCKET_SIZES, Draft
from .data import StepTime

GAIN = 0.01  # a smaller one is noise of the profile
GAIN_OF_HALVES = 0.1  # they cost an update a bucket: 9 % on two H200 where nothing was left to hide


def tuned(draft: Draft, cost: Callable[[Draft], StepTime], *, parts: bool) -> Draft:
    """The draft with the bucket size, and halves or whole sums, that take the least time.

    Small buckets pay the start of a collective more often; of a large one the last is exchanged
    when nothing is left to compute. The usual size stays unless another is faster by 1 %, and sums
    stay whole unless halves are by 10 %. Unless `parts` can be updated one by one, sums are whole.

    Source: Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous
    SGD Algorithms", INFOCOM 2019, with one size for all buckets in place of any set of merges.
    """
    whole = _sized(msgspec.structs.replace(draft, decouple=bool(draft.decouple)), cost)
    if draft.decouple is not None or not parts or draft.strategy.sharers == 1:
        return whole
    halves = _sized(msgspec.structs.replace(draft, decouple=True), cost)
    return halves if _is_faster(halves, whole, cost, GAIN_OF_HALVES) else whole


def usual(draft: Draft) -> Draft:
    """What is left open as it usually is: buckets of 25 MiB, whole sums."""
    size = draft.bucket_bytes or BUCKET_BYTES
    return msgspec.structs.replace(draft, bucket_bytes=size, decouple=bool(draft.decouple))


def _sized(draft: Draft, cost: Callable[[Draft], StepTime]) -> Draft:
    if draft.bucket_bytes or draft.strategy.sharers == 1:
        return usual(draft)
    tried = [msgspec.structs.replace(draft, bucket_bytes=size) for size in BUCKET_SIZES]
    best = min(tried, key=lambda each: cost(each).step_s)
    return best if _is_faster(best, usual(draft), cost, GAIN) else usual(draft)


def _is_faster(one: Draft, other: Draft, cost: Callable[[Draft], StepTime], gain: float) -> bool:
    return cost(one).step_s < (1 - gain) * cost(other).step_s
