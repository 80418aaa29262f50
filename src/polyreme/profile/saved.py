"""Bytes that layers keep for their backward passes, each storage of a model counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from ..graph.layer import LayerGraph
from ..graph.tensor import TensorPlan, token_interval
from ..sample import TensorSpec
from .record import KeptBytes, PartBytes
from .trace import Argument, Played, Stand, Trace, tensor_dtype

_ALONE, _SMALL, _LARGE = 1, 2, 3  # samples of the passes that are played


class SavedBytes(KeptBytes, frozen=True, kw_only=True):
    """Bytes per sample of a layer kind; `fixed`, `alone` and `parts` as in `LayerTimes`.

    `strides` says of inputs of the last such layer how those of several samples lie in memory.
    """

    fixed: KeptBytes = KeptBytes()
    alone: KeptBytes = KeptBytes()
    parts: Mapping[int, PartBytes] = {}
    strides: Mapping[str, tuple[int, ...]] = {}


def saved_bytes(
    graph: LayerGraph, precision: str, *, fused: bool = True, parts: Iterable[int] = ()
) -> Mapping[str, SavedBytes]:
    """Saved bytes of each kind, parameters and buffers apart, every storage counted once.

    `fused` says that attention with dropout runs in fused kernels, as it does on accelerators;
    `parts` of how many tensor parts one is to be played too.

    A tensor that several layers save (one's output, the next one's input; an encoder's output) is
    counted at the first; kinds get the mean over their layers, so that the whole model's sum is
    right. Each microbatch is taken to have its own of what does not grow with it. A microbatch of
    one sample is played by itself: in it some tensors are views of others that are copies in
    larger ones.
    """
    found: dict[int, list[dict[str, list[_Kept]]]] = {}
    strides: Mapping[str, tuple[int, ...]] = {}
    kinds = {layer.kind: layer for layer in graph.layers}
    for degree in sorted({1, *parts}):
        stands = {kind: Stand(graph, layer, degree) for kind, layer in kinds.items()}
        found[degree] = []
        for batch in (_ALONE, _SMALL, _LARGE):
            how = Played(batch=batch, precision=precision, fused=fused)
            kept, strides = _account(graph, degree, stands, how)
            found[degree].append(kept)
    return {
        kind: _of_kind(
            {degree: [each[kind] for each in by] for degree, by in found.items()},
            {name: strides[name] for name in layer.inputs if name in strides},
        )
        for kind, layer in kinds.items()
    }


class _Kept(NamedTuple):
    """Bytes of a pass, with whole tokens: saved, recompute, again; and the same with split ones."""

    whole: tuple[int, int, int]
    split: tuple[int, int, int]


def _of_kind(
    passes: Mapping[int, Sequence[Sequence[_Kept]]], strides: Mapping[str, tuple[int, ...]]
) -> SavedBytes:
    """Of the layers of a kind, by the number of tensor parts and the samples of the pass."""
    of_parts = {}
    for degree, by_batch in passes.items():
        whole, fixed, alone = _line([[each.whole for each in kept] for kept in by_batch])
        split, _, _ = _line([[each.split for each in kept] for kept in by_batch])
        of_parts[degree] = PartBytes(whole=whole, split=split, fixed=fixed, alone=alone)
    one = of_parts.pop(1)
    return SavedBytes(
        saved=one.whole.saved,
        recompute=one.whole.recompute,
        again=one.whole.again,
        fixed=one.fixed,
        alone=one.alone,
        parts=of_parts,
        strides=strides,
    )


def _line(
    passes: Sequence[Sequence[tuple[int, int, int]]],
) -> tuple[KeptBytes, KeptBytes, KeptBytes]:
    """Bytes of a sample, those of any microbatch, and those that one of one sample has beside.

    Means over layers; of what is kept `again`, the most of any.
    """
    n = len(passes[0])
    sums = [
        (sum(each[0] for each in kept), sum(each[1] for each in kept), n * max(k[2] for k in kept))
        for kept in passes
    ]
    sample, fixed, alone = [], [], []
    for one, small, large in zip(*sums, strict=True):
        slope = (large - small) // (_LARGE - _SMALL)
        still = max(0, small - _SMALL * slope)
        sample.append(math.ceil(slope / n))
        fixed.append(math.ceil(still / n))
        alone.append(math.ceil((one - still - _ALONE * slope) / n))
    return _kept(sample), _kept(fixed), _kept(alone)


def _kept(amounts: Sequence[int]) -> KeptBytes:
    saved, recompute, again = amounts
    return KeptBytes(saved=saved, recompute=recompute, again=again)


def _account(
    graph: LayerGraph, degree: int, stands: Mapping[str, Stand], how: Played
) -> tuple[dict[str, list[_Kept]], Mapping[str, tuple[int, ...]]]:
    """What each layer of each kind keeps of one pass through the whole model; strides by name."""
    specs = tensor_specs(graph, degree)
    traces: dict[tuple[str, tuple[Argument, ...]], Trace] = {}
    heap = _Heap(
        {
            name: how.batch * math.prod(spec.shape) * tensor_dtype(spec, how.precision).itemsize
            for name, spec in specs.items()
        }
    )
    found: dict[str, list[_Kept]] = {}
    for layer in graph.layers:
        inputs = tuple(heap.argument(name, specs[name]) for name in layer.inputs)
        if (layer.kind, inputs) not in traces:
            traces[layer.kind, inputs] = stands[layer.kind].trace(inputs, how)
        results = [f"{layer.name}.{output}" for output in layer.outputs]
        kept = heap.kept(
            traces[layer.kind, inputs],
            layer.inputs,
            results,
            graph.tensor_plan(layer.name),
            degree,
        )
        found.setdefault(layer.kind, []).append(kept)
    return found, heap.strides


class _Heap:
    """Tensors between layers: bytes, whose storage each is, and what is held already."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self._learned: set[str] = set()
        self.strides: dict[str, tuple[int, ...]] = {}
        self._sizes = sizes
        self._owner: dict[str, str] = {}
        self._saved: set[str] = set()
        self._handed: set[str] = set()

    def argument(self, name: str, spec: TensorSpec) -> Argument:
        """A tensor as the next layer gets it."""
        return Argument(spec=spec, strides=self.strides.get(name), learns=name in self._learned)

    def kept(
        self,
        found: Trace,
        inputs: Sequence[str],
        results: Sequence[str],
        plan: TensorPlan | None,
        degree: int,
    ) -> _Kept:
        """What the next layer of a pass adds to what is kept."""
        sources = [self._owner.get(name, name) for name in inputs]
        self._learned.update(name for name, grad in zip(results, found.learns, strict=True) if grad)
        self.strides.update(zip(results, found.strides, strict=True))
        passed = zip(results, found.passed, found.output_bytes, strict=True)
        for result, source, n_bytes in passed:
            self._owner[result] = result if source is None else sources[source]
            self._sizes[result] = n_bytes
        ends = {name for name, kept in zip(sources, found.inputs, strict=True) if kept}
        read = {name for name, kept in zip(sources, found.reads, strict=True) if kept} & ends
        ends |= {
            self._owner[name] for name, kept in zip(results, found.outputs, strict=True) if kept
        }
        fresh, beside = {*sources} - self._handed, ends - {*sources}
        new = ends - self._saved
        self._saved |= ends
        self._handed.update(sources)
        whole = (
            found.inside + self._bytes(new),
            self._bytes(fresh),
            found.inside + self._bytes(beside),
        )
        if plan is None or plan.whole is not None:  # every part computes all of it
            return _Kept(whole, whole)
        share = _first_share(plan, degree)
        own = found.in_regions + math.ceil(share * (found.inside - found.in_regions - found.read))
        own += found.read + self._bytes(read)  # gathered, beside what a part has of it
        split = (
            own + self._divided(new - read, share),
            self._divided(fresh, share),
            own + self._divided(beside - read, share),
        )
        return _Kept(whole, split)

    def _divided(self, names: Iterable[str], share: Fraction) -> int:
        """With split tokens each part has its own of what layers give, and all of the batch."""
        return sum(
            self._sizes[name] if name.startswith("batch:") else math.ceil(self._sizes[name] * share)
            for name in names
        )

    def _bytes(self, names: Iterable[str]) -> int:
        return sum(self._sizes[name] for name in names)


def _first_share(plan: TensorPlan | None, degree: int) -> Fraction:
    """Of what lies between regions, the first part's where tokens are split: it has most."""
    if plan is None or plan.n_tokens is None:
        return Fraction(1, degree)
    start, stop = token_interval(plan.n_tokens, degree, 0)
    return Fraction(stop - start, plan.n_tokens)


def tensor_specs(graph: LayerGraph, parts: int = 1) -> dict[str, TensorSpec]:
    """Every tensor of the graph by the name under which layers read it.

    Of several tensor `parts`, as the first has it, with whole tokens. Floating fields of a batch
    are cast to the dtype that layers compute in.
    """
    specs = {
        f"batch:{name}": TensorSpec(spec.shape) if "float" in spec.dtype else spec
        for name, spec in graph.inputs.items()
    }
    for layer in graph.layers:
        plan = graph.tensor_plan(layer.name) if parts > 1 else None
        for name, spec in layer.outputs.items():
            shape = spec.shape
            if plan is not None:
                shape = plan.output_shape(name, shape, parts, 0, sp=False)
            specs[f"{layer.name}.{name}"] = TensorSpec(shape, spec.dtype)
    return specs
