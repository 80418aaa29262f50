"""What a slice of tokens takes of a stage's pass, and the slices that make a step shortest."""

from __future__ import annotations

import functools
import math

from ...graph.layer import LayerGraph
from ...graph.tensor import token_interval
from ...plan.order.terapipe import best_slices
from ...profile.fit import Fit
from ..draft import Draft

MOST = 32  # slices; the programme tries all cuts at multiples of a thirty-second of the tokens


def even_slices(n_tokens: int, n: int) -> tuple[int, ...]:
    """Tokens of slices that are as even as can be.

    >>> even_slices(10, 4)
    (3, 3, 2, 2)
    """
    spans = [token_interval(n_tokens, n, at) for at in range(n)]
    return tuple(stop - start for start, stop in spans)


class SliceCost:
    """Slices of the stage that takes longest.

    A pass of a layer starts in the seconds by which two samples take less than twice one. Of the
    rest, products with weights go by a slice's tokens, attention by these times the tokens that
    they attend to: half of their own, and all before them. Attention's part is that of its flops,
    4 S^2 H a sample. Li et al. 2021, section 3.2, fit such a form to slices that they measure.
    """

    def __init__(self, graph: LayerGraph, fit: Fit) -> None:
        self._graph, self._fit = graph, fit
        self._layer = functools.cache(self._parts)

    def best(self, draft: Draft) -> tuple[int, ...]:
        """Tokens of each slice by the dynamic programme; one where slices do not pay."""
        n_tokens = self._n_tokens
        multiple = 8 * math.ceil(n_tokens / (8 * MOST))
        names = self._longest(draft)
        return best_slices(
            lambda tokens, context: self._pass_s(names, draft.microbatch, tokens, context),
            n_tokens,
            draft.pp,
            multiple=multiple,
        )

    def shares(self, draft: Draft, lengths: tuple[int, ...]) -> tuple[float, ...]:
        """Of the pass over all tokens, what each slice takes."""
        names, size = self._longest(draft), draft.microbatch
        whole_s = self._pass_s(names, size, self._n_tokens, 0)
        return tuple(
            self._pass_s(names, size, tokens, sum(lengths[:at])) / whole_s
            for at, tokens in enumerate(lengths)
        )

    @property
    def _n_tokens(self) -> int:
        return self._graph.inputs["input_ids"].shape[0]

    def _longest(self, draft: Draft) -> tuple[str, ...]:
        def whole_s(names: tuple[str, ...]) -> float:
            return self._pass_s(names, draft.microbatch, self._n_tokens, 0)

        return max(draft.stages, key=whole_s)

    def _pass_s(self, names: tuple[str, ...], size: int, tokens: int, context: int) -> float:
        """Forward and backward seconds of a slice behind so many tokens."""
        n = self._n_tokens
        total_s = 0.0
        for name in names:
            start_s, work_s, attention = self._layer(name, size)
            attended = tokens * (2 * context + tokens) / n**2
            total_s += start_s + work_s * ((1 - attention) * tokens / n + attention * attended)
        return total_s

    def _parts(self, name: str, size: int) -> tuple[float, float, float]:
        """Seconds in which a layer's pass starts, those of its work, attention's part of these."""
        layer = self._graph.layer(name)

        def seconds(samples: int) -> float:
            return self._fit.forward_s(layer.kind, samples) + self._fit.backward_s(
                layer.kind, samples
            )

        start_s = max(0.0, 2 * seconds(1) - seconds(2))
        hidden = layer.outputs.get("hidden")
        flops = 4 * self._n_tokens**2 * hidden.shape[-1] if hidden is not None else 0
        # One that has fewer flops than that does not attend.
        attention = flops / layer.flops if flops < layer.flops else 0.0
        return start_s, max(0.0, seconds(size) - start_s), attention
