"""Random bits by place on accelerators, for other compiled passes: as `counted.hashed`.

Compiled by Triton, which torch brings along where there is one: import this only then.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def hashed(at):  # type: ignore[no-untyped-def]
    """64 bits (uint64) for each int64, which is a place and the key together."""
    mixed = at.to(tl.uint64) * _GAMMA
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    return mixed ^ (mixed >> 31)
