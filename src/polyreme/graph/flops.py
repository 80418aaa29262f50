"""Flops counted from the operators that a module really calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def counted(
    module: nn.Module, arguments: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], float]:
    """What the module returns, as a tuple, and the flops of that call (2 per multiply-add)."""
    # torch 2.13 leaves the fused attention of CPUs out of its table.
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={fused: _sdpa}) as counter:
        out = module(*arguments)
    return (out if isinstance(out, tuple) else (out,)), float(counter.get_total_flops())


def _sdpa(query: list[int], key: list[int], value: list[int], *_: object, **__: object) -> int:
    return sdpa_flop_count(query, key, value)
