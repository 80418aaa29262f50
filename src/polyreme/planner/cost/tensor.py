"""Tensor parts: what of a layer's passes they share, and what they exchange in each microbatch.

Assumed: the parts of a layer that has regions share all of its computation; each region costs one
all-reduce of the hidden forward and one backward, or a gather and a reduce-scatter each way where
tokens are split, of the same bytes.
"""

from __future__ import annotations

import math

import msgspec

from ...graph.layer import LayerGraph
from ...profile.fit import Fit
from ..draft import Draft


class PartsTime(msgspec.Struct, frozen=True, kw_only=True):
    """Of one layer and microbatch: by what its computation is divided, seconds of its exchanges."""

    share: int
    comm_s: float


class TensorCost:
    """What tensor parts make of a layer's passes."""

    def __init__(self, graph: LayerGraph, fit: Fit) -> None:
        self._graph, self._fit = graph, fit

    def __call__(self, name: str, draft: Draft, width: int) -> PartsTime:
        """Exchanges of one pass, forward or backward: they are the same."""
        strategy, plan = draft.strategy, self._graph.tensor_plan(name)
        if strategy.tp == 1 or plan is None or not plan.cuttings:
            return PartsTime(share=1, comm_s=0.0)
        n = max(1, sum(region.exit is not None for region in plan.regions))
        outputs = self._graph.layer(name).outputs
        hidden = next((spec for key, spec in outputs.items() if key != "logits"), None)
        if hidden is None:  # a head: three sums of one number a label
            n, elements = 3, math.prod(next(iter(outputs.values())).shape[:-1])
        else:
            elements = math.prod(hidden.shape)
        n_bytes = elements * draft.microbatch * width
        each_s = self._fit.collective_s("all_reduce", strategy.tp, n_bytes, 1)
        return PartsTime(share=strategy.tp, comm_s=n * each_s)
