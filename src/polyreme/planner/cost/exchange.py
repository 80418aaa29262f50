"""How gradients that are whole on each device are exchanged, where the user leaves it open."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...plan.ir import BUCKET_BYTES
from ..draft import Draft
from .data import StepTime

SIZES = tuple(2**power for power in range(18, 29))  # 256 KiB to 256 MiB
GAIN = 0.01  # a smaller one is noise of the profile


def tuned(draft: Draft, cost: Callable[[Draft], StepTime], *, parts: bool) -> Draft:
    """The draft with the bucket size, and halves or whole sums, that take the least time.

    Small buckets pay the start of a collective more often; of a large one the last is exchanged
    when nothing is left to compute. The usual ones stay unless another is faster by 1 %. Unless
    `parts` can be updated one by one, sums are whole.

    Source: Shi, Chu and Li, "MG-WFBP: Efficient Data Communication for Distributed Synchronous
    SGD Algorithms", INFOCOM 2019, with one size for all buckets in place of any set of merges.
    """
    usual = msgspec.structs.replace(
        draft, bucket_bytes=draft.bucket_bytes or BUCKET_BYTES, decouple=bool(draft.decouple)
    )
    sizes = (draft.bucket_bytes,) if draft.bucket_bytes else SIZES
    halves = (False, parts) if draft.decouple is None else (draft.decouple,)
    if draft.strategy.data == 1 or (len(sizes) == 1 and len(set(halves)) == 1):
        return usual
    tried = [
        msgspec.structs.replace(draft, bucket_bytes=size, decouple=half)
        for half in dict.fromkeys(halves)
        for size in sizes
    ]
    best = min(tried, key=lambda each: cost(each).step_s)
    return best if cost(best).step_s < (1 - GAIN) * cost(usual).step_s else usual
