"""Gradients that parts hold in pieces, summed over those who hold the same parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....graph.cut import Cut
from .part import Tp


def sum_partial(gradients: Sequence[tuple[Cut, torch.Tensor]], tp: Tp) -> None:
    """Sum each gradient over the parts that hold its parameter, in place; one collective.

    Gradients have any shape that is the same on these parts (a shard of the parameter's, as
    well); those that are not partial stay as they are. All parts give the same parameters in
    the same order. Where only some parts hold the same (heads fewer than parts), each of them
    sends room for the others', so that no groups of their own are needed.
    """
    partial = [(cut, grad) for cut, grad in gradients if cut.partial]
    for dtype in sorted({grad.dtype for _, grad in partial}, key=str):
        same = [(cut, grad) for cut, grad in partial if grad.dtype == dtype]
        sizes = [tp.degree // cut.copies * grad.numel() for cut, grad in same]
        flat = same[0][1].new_zeros(sum(sizes))
        rooms = []
        for (cut, grad), room in zip(same, torch.split(flat, sizes), strict=True):
            mine = room.view(tp.degree // cut.copies, grad.numel())[tp.rank // cut.copies]
            mine.copy_(grad.reshape(-1))
            rooms.append(mine)
        tp.traffic.all_reduce(flat, tp.group, alike=False)
        for (_, grad), mine in zip(same, rooms, strict=True):
            grad.copy_(mine.view(grad.shape))
