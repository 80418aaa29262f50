"""Forward and backward seconds of layer kinds on this device, against the microbatch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from ..errors import RunError
from ..profile.record import LayerTimes, PassTimes
from ..profile.saved import SavedBytes
from .agree import largest
from .device import gradient_host_s
from .memory import with_bytes
from .passes import LASTING_LEAST_S, LASTING_S, REPEAT_S, REPEATS, HeadStart, Passes
from .stand import Stand

if TYPE_CHECKING:
    from ..graph.layer import Layer, LayerGraph
    from ..runtime.mesh import World

MICROBATCHES = tuple(2**power for power in range(10))
MEMORY_SHARE = 0.4  # of what is free may be taken by one microbatch
ENOUGH_S = 0.25  # a pass this long tells the slope; larger microbatches are not tried
COMPILED_SIZES = 3  # of a kind; each is compiled for itself, which takes seconds
COMPILED_PART_SIZES = 2


def measure_layers(
    graph: LayerGraph,
    precision: str,
    world: World,
    saved: Mapping[str, SavedBytes],
    sizes: tuple[int, ...],
    budget_s: float,
    *,
    compiled: bool = False,
) -> dict[str, LayerTimes]:
    """Times of every kind at microbatches of `sizes` (rising from 1) as far as seconds allow.

    Kinds share the seconds, each gets at least one microbatch. What is `compiled` is compiled for
    each size; then only some of those that fit are tried, and the compiling is no part of the
    seconds.

    So does each number of tensor parts that so many processes can be; what these exchange is left
    out. The loss is part of the layer that gives the logits, if no other layer is of its kind.

    Raises:
        RunError: one sample does not fit; names the layer.
    """
    kinds: dict[str, Layer] = {layer.kind: layer for layer in graph.layers}
    light_first = sorted(kinds.items(), key=lambda item: item[1].flops)  # leave more to the rest
    degrees = [n for n in graph.tensor_degrees(world.n_ranks) if world.n_ranks % n == 0]
    todo = [
        (kind, layer, tp)
        for kind, layer in light_first
        for tp in (degrees if _is_cut(graph, layer) else (1,))
    ]
    head = None if world.accelerator.on_host else HeadStart(world)
    each_s = 0.0 if head is None else gradient_host_s(world, precision, head)
    times: dict[str, LayerTimes] = {}
    parts: dict[str, dict[int, PassTimes]] = {kind: {} for kind in kinds}
    for index, (kind, layer, tp) in enumerate(todo):
        start_s = time.perf_counter()
        stand = Stand(
            graph,
            layer,
            precision,
            world,
            tp,
            compiled=compiled,
            strides=saved[kind].strides,
            head=head,
            gradient_host_s=each_s,
            lasting_s=_lasting_s(graph, kind),
        )
        tried = sizes
        if compiled:
            n = COMPILED_SIZES if tp == 1 else COMPILED_PART_SIZES
            tried = _spread(_fitting(world, saved[kind], sizes), n)
        found = _measure_kind(stand, saved[kind], tried, budget_s / (len(todo) - index))
        stand.close()
        budget_s -= largest(world, time.perf_counter() - start_s - stand.apart_s)
        if tp == 1:
            counted = msgspec.structs.replace(
                _with_bytes(found, saved[kind]), recompute_shares=tuple(stand.shares)
            )
            times[kind] = with_bytes(counted, stand.held, stand.loss_bytes)
        else:
            parts[kind][tp] = found
    return {
        kind: msgspec.structs.replace(times[kind], parts=parts[kind]) for kind, _ in light_first
    }


def _lasting_s(graph: LayerGraph, kind: str) -> float:
    """How long passes of a kind follow one another: the whole time where it is half of a step."""
    own = sum(layer.flops for layer in graph.layers if layer.kind == kind)
    share = own / max(1.0, sum(layer.flops for layer in graph.layers))
    return max(LASTING_LEAST_S, LASTING_S * min(1.0, 2 * share))


def _fitting(world: World, saved: SavedBytes, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes whose microbatches will find room; the first is tried in any case."""
    return (sizes[0], *(size for size in sizes[1:] if _fits(world, size * saved.saved)))


def _spread(sizes: tuple[int, ...], n: int) -> tuple[int, ...]:
    """At most so many of them, the first and the last among them, evenly by their places.

    >>> _spread((1, 2, 4, 8, 16), 3), _spread((1, 2), 3)
    ((1, 4, 16), (1, 2))
    """
    if len(sizes) <= n:
        return sizes
    return tuple(sizes[round(place * (len(sizes) - 1) / (n - 1))] for place in range(n))


def _is_cut(graph: LayerGraph, layer: Layer) -> bool:
    """Whether tensor parts share what the layer computes."""
    plan = graph.tensor_plan(layer.name)
    return plan is not None and bool(plan.cuttings)


def _with_bytes(times: PassTimes, saved: SavedBytes) -> LayerTimes:
    return LayerTimes(
        microbatch=times.microbatch,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        saved_bytes_per_sample=saved.saved,
        host_s=times.host_s,
        recompute_bytes_per_sample=saved.recompute,
        again_bytes_per_sample=saved.again,
        fixed_bytes=saved.fixed,
        alone_bytes=saved.alone,
        part_bytes=saved.parts,
    )


def _measure_kind(
    stand: Stand, saved: SavedBytes, sizes: tuple[int, ...], budget_s: float
) -> PassTimes:
    """One microbatch after another until a pass is long enough, or seconds or memory run out.

    On an accelerator the largest that finds room is measured in any case: what the host takes for
    short passes says nothing of long ones.
    """
    world = stand.world
    start_s = time.perf_counter()
    passes: dict[int, Passes] = {}
    spent_s = 0.0
    todo = list(sizes)
    while todo:
        size = todo.pop(0)
        found = stand.timed(size)
        if found is None:
            break
        passes[size] = found
        if stand.tp == 1 and stand.head is not None:
            stand.hold(size)
        if found.device_s > ENOUGH_S or not todo or not _fits(world, todo[0] * saved.saved):
            break
        before_s, spent_s = spent_s, time.perf_counter() - start_s - stand.apart_s
        next_s = todo[0] / size * found.device_s
        next_s += min(next_s * REPEATS, REPEAT_S)
        if stand.head is not None:  # most of what a size takes does not grow with it
            next_s += spent_s - before_s
        if largest(world, spent_s + next_s) > budget_s:
            todo = [] if stand.head is None else _largest_fitting(world, saved, todo)
    if not passes:
        raise RunError(
            f'layer "{stand.layer.name}" ran out of memory on one sample; a device must hold one '
            "layer and one sample to measure it"
        )
    passes = _lasting(passes)
    return PassTimes(
        microbatch=tuple(passes),
        forward_s=tuple(each.forward_s for each in passes.values()),
        backward_s=tuple(each.backward_s for each in passes.values()),
        host_s=stand.host_s if stand.head is not None else None,
    )


def _lasting(passes: Mapping[int, Passes]) -> dict[int, Passes]:
    """All as of a device that is not rested.

    Those for which it waits are not timed so: they are taken to be slower as larger ones are. In a
    step the host may hold it up less.
    """
    found, longer = dict(passes), None
    for size in sorted(passes, reverse=True):
        if passes[size].longer is not None:
            longer = passes[size].longer
        elif longer is not None:
            found[size] = passes[size].lasting(longer)
    return found


def _largest_fitting(world: World, saved: SavedBytes, sizes: Sequence[int]) -> list[int]:
    """The last of rising sizes that finds room, if one does."""
    fitting = [size for size in sizes if _fits(world, size * saved.saved)]
    return fitting[-1:]


def _fits(world: World, need_bytes: int) -> bool:
    """Whether every process has room for so much; host memory is shared by its processes."""
    free_bytes = world.accelerator.free_bytes() * MEMORY_SHARE
    if world.accelerator.on_host:
        need_bytes *= world.n_local
    return not largest(world, float(need_bytes > free_bytes))
