"""Layers with experts: what of them may be dealt out, and how they are computed.

A router gives each token the few experts that score it highest, and the token's result is their
weighted sum. Source: Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017; of the form
that is cut here: Jiang et al., "Mixtral of Experts", 2024, section 2.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

IMPLEMENTATION = "polyreme"  # the name under which transformers finds `compute`


class ExpertPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The experts of a layer's module: each token goes to `top_k` of `n_experts`.

    `params` are parameters by their path in the module, whose dim 0 counts experts. What an expert
    takes and gives of a token has `n_features`; a sample has `n_tokens`.
    """

    params: tuple[str, ...]
    n_experts: int
    top_k: int
    n_tokens: int
    n_features: int

    def legal(self, degree: int) -> bool:
        """Whether so many devices can have as many experts each."""
        return degree >= 1 and self.n_experts % degree == 0


def use(config: Any) -> None:
    """Let models of this configuration compute their experts with `compute`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute)
    config._experts_implementation = IMPLEMENTATION


def compute(
    experts: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What experts give for `hidden` (N, D), of which each token has `chosen` (N, k) experts.

    Summed by `weights` (N, k). Tokens are sorted by expert, and each expert's rows are multiplied
    by its matrices (the library's grouped products). torch has none in float64: there each expert
    is run in turn, as the library does. Where tensors hold no data, on meta or as fake ones, the
    rows of all go through the first expert's matrices: as many flops and saved bytes, whoever is
    chosen.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers.integrations.moe import grouped_mm_experts_forward

    if hidden.is_meta or isinstance(hidden, FakeTensor):
        with _FirstForAll():
            return grouped_mm_experts_forward(experts, hidden, chosen, weights)
    if hidden.dtype == torch.float64:
        in_turn = type(experts).forward.__wrapped__
        found: torch.Tensor = in_turn(experts, hidden, chosen, weights)
        return found
    return grouped_mm_experts_forward(experts, hidden, chosen, weights)


class _FirstForAll(TorchFunctionMode):
    """A grouped product as that of all rows with the first matrix."""

    _GROUPED = (torch.nn.functional.grouped_mm, torch._grouped_mm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._GROUPED:
            rows, matrices = args[:2]
            return rows @ matrices[0]
        return func(*args, **(kwargs or {}))
