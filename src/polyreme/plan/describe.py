"""A plan in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from ..units import count
from .grid import INNER_AXES, even_degrees
from .ir import LayerPlan, Level, Plan, ShardTree, axes, degree

_MOST_NAMED = 8  # stages
_PLURAL = {"replica": "replicas", "shard": "shards"}


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How a layer runs, as far as a line tells.

    `degrees` are of axes that cut it, outermost first; `data` is how many parts of the batch its
    devices take, None where they are uneven. Its experts are dealt out to `ep` of them.
    """

    degrees: tuple[tuple[str, int], ...]
    data: int | None
    level: Level = "none"
    ep: int = 1
    sp: bool = False
    recompute: bool = False
    offload: tuple[str, ...] = ()


def describe(plan: Plan) -> str:
    """The plan in one line: ``2 replicas x 4 shards (params), recompute, 2 microbatches of ..``."""
    known = {id(each): _way(each) for each in plan.layer_plans.values()}
    stages = ""
    if len(plan.stages) > 1:
        n_ranks = len({each for stage in plan.stages for each in stage.placements})
        sizes = [len(stage.layers) for stage in plan.stages]
        stages = describe_stages(sizes, n_ranks, plan.order_name, len(plan.token_slices))
    return describe_step(
        Counter(known[id(each)] for each in plan.layer_plans.values()),
        stages=stages,
        microbatches=plan.microbatches,
        global_batch=plan.global_batch,
    )


def describe_step(
    ways: Mapping[Way, int], *, stages: str, microbatches: int, global_batch: int
) -> str:
    """A step in one line, from how many layers run in which way; `stages` in words, or empty.

    >>> ways = {Way(degrees=(("shard", 4), ("tp", 2)), data=4, level="grads"): 6}
    >>> describe_step(ways, stages="", microbatches=2, global_batch=64)
    '4 shards (grads) x 2 tp, 2 microbatches of 8 samples'
    """
    layers: Counter[str] = Counter()
    for way, n in ways.items():
        layers[describe_way(way, " each" if stages else "")] += n
    alike = len(layers) == 1
    parts = [stages] if stages else []
    parts += [text if alike else f"{count(n, 'layer')}: {text}" for text, n in layers.most_common()]
    passes = count(microbatches, "microbatch", "microbatches")
    parts.append(passes + _samples({way.data for way in ways}, microbatches, global_batch))
    return (", " if alike else "; ").join(parts)


def describe_way(way: Way, each: str = "") -> str:
    """A way in words: ``2 replicas x 4 shards (params), recompute``; `each` follows one device."""
    parts = []
    for axis, n in way.degrees:
        level = f" ({'batch' if way.level == 'none' else way.level})" if axis == "shard" else ""
        parts.append(f"{n} {_PLURAL.get(axis, axis)}{level}")
    text = " x ".join(parts) or f"1 device{each}"
    if way.ep > 1:
        text += f", {way.ep} ep"
    for name in ("sp", "recompute"):
        if getattr(way, name):
            text += f", {name}"
    return f"{text}, {describe_offload(way.offload)}" if way.offload else text


def describe_offload(causes: Collection[str]) -> str:
    """What lies in hosts' memory, in words.

    >>> describe_offload({"parameters", "gradients", "optimizer"})
    'gradients + optimizer + parameters offloaded'
    """
    return f"{' + '.join(sorted(causes))} offloaded"


def describe_stages(sizes: Sequence[int], n_ranks: int, order: str, n_slices: int = 0) -> str:
    """Stages, the ranks if they are fewer, the order's name, and slices of tokens if it has any.

    `sizes` are the layers of each stage; they are named where a few are unequal by more than one.

    >>> describe_stages((3, 3, 3, 2), 2, "zb-v")
    '4 stages on 2 ranks (zb-v)'
    >>> describe_stages((1, 5), 2, "1f1b")
    '2 stages of 1 + 5 layers (1f1b)'
    >>> describe_stages((3, 3), 2, "terapipe", 1)
    '2 stages (terapipe), 1 slice of tokens'
    """
    n_stages = len(sizes)
    ranks = f" on {n_ranks} ranks" if n_ranks != n_stages else ""
    if n_stages <= _MOST_NAMED and max(sizes) - min(sizes) > 1:
        ranks += f" of {' + '.join(map(str, sizes))} layers"
    name = f" ({order})" if order else ""
    slices = f", {count(n_slices, 'slice')} of tokens" if n_slices else ""
    return f"{n_stages} stages{ranks}{name}{slices}"


def _way(layer_plan: LayerPlan) -> Way:
    split = layer_plan.split
    even = even_degrees(split)
    return Way(
        degrees=degrees_of(split),
        data=even.data if even is not None else None,
        level=layer_plan.level,
        ep=even.ep if even is not None else 1,
        sp=layer_plan.sp,
        recompute=layer_plan.recompute,
        offload=tuple(sorted(layer_plan.offload)),
    )


def degrees_of(split: ShardTree) -> tuple[tuple[str, int], ...]:
    """Axes that cut a layer and into how many parts, outermost first.

    Experts, which are no further axis, only where parts are uneven.
    """
    even = even_degrees(split)
    if even is None:
        return tuple((axis, degree(split, axis)) for axis in axes(split))
    return tuple((axis, n) for axis in INNER_AXES if (n := getattr(even, axis)) > 1)


def _samples(data: set[int | None], microbatches: int, global_batch: int) -> str:
    """Samples of the largest microbatch, where it is the same for all layers."""
    parts = next(iter(data)) if len(data) == 1 else None
    if parts is None or microbatches < 1:
        return ""
    most = math.ceil(math.ceil(global_batch / parts) / microbatches)
    up_to = "up to " if global_batch % (parts * microbatches) else ""
    return f" of {up_to}{count(most, 'sample')}"
