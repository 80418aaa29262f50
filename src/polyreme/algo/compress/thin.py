"""Orthonormal bases of thin matrices on accelerators, in one kernel where torch takes dozens.

Compiled by Triton, which torch brings along where there is one: import this only then.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_ROWS, MOST_COLUMNS = 1 << 16, 8  # one program goes through all of them
_ROWS = 512  # at once
_NOTHING = 1e-26  # of a column's square; float64 has no direction for what is left then


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Columns of length 1 that span what those of a (rows, rank) matrix span.

    Zeros stand for one that adds nothing. Gram-Schmidt in float64, each column twice.

    Source: Giraud et al. 2005, "The loss of orthogonality in the Gram-Schmidt
    orthogonalization process".
    """
    n, rank = columns.shape
    work = torch.empty(n, rank, dtype=torch.float64, device=columns.device)
    wide = 1 << (rank - 1).bit_length()
    _orthonormal[1,](columns.contiguous(), work, n, _NOTHING, rank, wide, _ROWS, num_warps=8)
    return work.to(columns.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _orthonormal(  # type: ignore[no-untyped-def]
    given,
    work,
    n,
    nothing,
    rank: tl.constexpr,
    wide: tl.constexpr,
    rows: tl.constexpr,
):
    column = tl.arange(0, wide)
    for own in tl.static_range(rank):
        whole = tl.full([], 0.0, tl.float64)
        for start in range(0, n, rows):
            at = start + tl.arange(0, rows)
            x = tl.load(given + at * rank + own, mask=at < n, other=0.0).to(tl.float64)
            tl.store(work + at * rank + own, x, mask=at < n)
            whole += tl.sum(x * x)
        tl.debug_barrier()
        left = whole
        for _ in tl.static_range(2):
            shares = tl.zeros([wide], tl.float64)
            for start in range(0, n, rows):
                at = start + tl.arange(0, rows)
                there = (at < n)[:, None] & (column < own)[None, :]
                basis = tl.load(work + at[:, None] * rank + column[None, :], mask=there, other=0.0)
                x = tl.load(work + at * rank + own, mask=at < n, other=0.0)
                shares += tl.sum(basis * x[:, None], axis=0)
            left = tl.full([], 0.0, tl.float64)
            for start in range(0, n, rows):
                at = start + tl.arange(0, rows)
                there = (at < n)[:, None] & (column < own)[None, :]
                basis = tl.load(work + at[:, None] * rank + column[None, :], mask=there, other=0.0)
                x = tl.load(work + at * rank + own, mask=at < n, other=0.0)
                x = x - tl.sum(basis * shares[None, :], axis=1)
                tl.store(work + at * rank + own, x, mask=at < n)
                left += tl.sum(x * x)
            tl.debug_barrier()
        scale = tl.where(left <= nothing * whole, 0.0, 1.0 / tl.sqrt(left))
        for start in range(0, n, rows):
            at = start + tl.arange(0, rows)
            x = tl.load(work + at * rank + own, mask=at < n, other=0.0)
            tl.store(work + at * rank + own, x * scale, mask=at < n)
        tl.debug_barrier()
