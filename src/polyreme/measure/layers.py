"""Forward and backward seconds of layer kinds on this device, against the microbatch."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RunError
from ..graph.loss import cross_entropy
from ..profile.record import HostSeconds, LayerTimes, PassTimes
from ..profile.saved import SavedBytes, tensor_specs
from ..profile.trace import compute_dtype, tensor_dtype
from ..runtime.compiled import compile_layer, compile_loss, forget_compiled
from ..sample import TensorSpec
from .agree import largest
from .device import gradient_host_s
from .inputs import lying
from .memory import PassBytes, drop_gradient, loss_bytes, pass_bytes, with_bytes
from .passes import REPEAT_S, REPEATS, HeadStart, Passes, Play, Ran, ran_once, timed

if TYPE_CHECKING:
    import torch

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
        stand = _Stand(
            graph,
            layer,
            precision,
            world,
            tp,
            compiled=compiled,
            strides=saved[kind].strides,
            head=head,
            gradient_host_s=each_s,
        )
        tried = sizes
        if compiled:
            n = COMPILED_SIZES if tp == 1 else COMPILED_PART_SIZES
            tried = _spread(_fitting(world, saved[kind], sizes), n)
        found = _measure_kind(stand, saved[kind], tried, budget_s / (len(todo) - index))
        stand.close()
        budget_s -= largest(world, time.perf_counter() - start_s - stand.compiling_s)
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


class _Stand:
    """A layer, or its first of `tp` parts, on this device, with all that a pass takes.

    `compiling_s` adds up what it took to compile it, its first passes included; `held` is what
    its passes held on an accelerator, `loss_bytes` what the loss after them held of a sample.
    """

    def __init__(
        self,
        graph: LayerGraph,
        layer: Layer,
        precision: str,
        world: World,
        tp: int = 1,
        *,
        compiled: bool = False,
        strides: Mapping[str, Sequence[int]] | None = None,
        head: HeadStart | None = None,
        gradient_host_s: float = 0.0,
    ) -> None:
        from ..runtime.stage import Body

        self.layer = layer
        self.head = head
        self._strides = strides or {}
        self.gradient_host_s = gradient_host_s
        self.world = world
        self.tp = tp
        self.compiled = compiled
        self.compiling_s = 0.0
        self.held: list[PassBytes] = []
        self.loss_bytes: int | None = None
        self.module = _filled(graph, layer, precision, world, tp)
        self.body = Body(self.module, recompute=False)
        self.shares: list[float] = []
        self.again_s: list[float] = []
        if compiled:
            with self._compiling():
                compile_layer(self.module)
        for weight in self.module.parameters():
            if weight.requires_grad:
                hook: Any = drop_gradient
                weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        specs = tensor_specs(graph, tp)
        self._inputs = [(name, specs[name]) for name in layer.inputs]
        self._precision = precision
        last, _, output = graph.output.rpartition(".")
        alone = Counter(other.kind for other in graph.layers)[layer.kind] == 1
        ends_here = alone and last == layer.name
        self._ends = specs[graph.output] if ends_here else None
        self._logits = list(layer.outputs).index(output) if ends_here else None
        self._score = compile_loss(cross_entropy) if compiled else cross_entropy

    def close(self) -> None:
        """Forget what was compiled: kinds and sizes of one class would add up."""
        if self.compiled:
            with self._compiling():
                forget_compiled()

    def warm(self, microbatch: int, *, recompute: bool = False) -> Play:
        """What `play` gives, after first passes that compile, or have libraries begin."""
        with self._compiling() if self.compiled else nullcontext():
            play = self.play(microbatch, recompute=recompute)
            if self.compiled or not self.world.accelerator.on_host:
                play()
        return play

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.compiling_s += time.perf_counter() - start_s

    def play(self, microbatch: int, *, recompute: bool = False) -> Play:
        """A function that asks for a forward and a backward pass and gives the timer of each."""
        import torch

        arguments = self._arguments(microbatch)
        weights = [weight for weight in self.module.parameters() if weight.requires_grad]
        leaves = [*weights, *(argument for argument in arguments if argument.requires_grad)]

        def ends() -> list[torch.Tensor]:
            out = self.body(*arguments)
            outputs = list(out) if isinstance(out, tuple) else [out]
            if self._logits is not None:
                logits = outputs[self._logits]
                labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
                outputs[self._logits] = self._score(logits, labels)[0]
            return [output for output in outputs if output.requires_grad]

        directions = [torch.ones_like(end) for end in ends()]

        def back(outputs: list[torch.Tensor]) -> None:
            if outputs:
                torch.autograd.backward(outputs, directions)

        def play() -> Ran:
            for leaf in leaves:
                leaf.grad = None
            self.body.recompute = recompute
            ran = ran_once(self.world, ends, back)
            self.body.recompute = False
            return ran

        return play

    def timed(self, microbatch: int) -> Passes | None:
        """Passes over such a microbatch; of a whole layer on an accelerator, recomputed ones too.

        Torch computes again no further than to the last tensor that the backward pass reads, and
        its hooks cost the host time.
        """
        ways = [lambda: self.warm(microbatch)]
        if self.tp == 1 and self.head is not None:
            ways.append(lambda: self.warm(microbatch, recompute=True))
        found = timed(self.world, ways, self.head)
        if found is None:
            return None
        plain, *again = found
        for each in again:
            more_s = max(0.0, each.device_s - plain.device_s)
            self.shares.append(more_s / plain.forward_s if plain.forward_s else 1.0)
            if each.waited:
                self.again_s.append(max(0.0, each.host_s - plain.host_s))
        return plain

    def hold(self, microbatch: int) -> None:
        """Have the allocator say what a pass holds, if no process runs out of memory."""
        import torch

        world, found, loss, ran_out = self.world, (0, 0), 0, False
        self.module.zero_grad(set_to_none=True)
        try:
            found = pass_bytes(self.module, self._arguments(microbatch), world.accelerator)
            if self._ends is not None:
                logits = self._random("", self._ends, microbatch)
                loss = loss_bytes(logits, world.accelerator, self._score)
        except torch.OutOfMemoryError:
            ran_out = True
        if largest(world, float(ran_out)):
            return
        kept, passing, loss = (int(largest(world, value)) for value in (*found, loss))
        self.held.append(PassBytes(microbatch=microbatch, kept=kept, passing=passing))
        self.loss_bytes = -(-loss // microbatch) if self._ends is not None else None

    def usual_host_s(self, passes: Sequence[Passes]) -> HostSeconds:
        """Of those of several sizes: what the host does is the same at each.

        Where the device waited at none, it waits with more layers no more.
        """
        waited = [each for each in passes if each.waited]
        if not waited:
            return HostSeconds(forward=0.0, backward=0.0)
        n_gradients = sum(weight.requires_grad for weight in self.module.parameters())
        return HostSeconds(
            forward=statistics.median(each.host_forward_s for each in waited),
            backward=statistics.median(each.host_backward_s for each in waited)
            + n_gradients * self.gradient_host_s,
            recompute=statistics.median(self.again_s) if self.again_s else 0.0,
        )

    def _arguments(self, microbatch: int) -> list[torch.Tensor]:
        return [
            self._random(name, spec, microbatch).requires_grad_(
                not name.startswith("batch:") and "int" not in spec.dtype and spec.dtype != "bool"
            )
            for name, spec in self._inputs
        ]

    def _random(self, name: str, spec: TensorSpec, microbatch: int) -> torch.Tensor:
        """Values such as the layer may get: numbers near 0, or indices that are legal anywhere."""
        import torch

        shape = (microbatch, *spec.shape)
        dtype = tensor_dtype(spec, self._precision)
        device = self.world.device
        if dtype.is_floating_point:
            return lying(shape, self._strides.get(name), dtype=dtype, device=device)
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype, device=device)
        rows = [
            module.num_embeddings
            for module in self.module.modules()
            if isinstance(module, torch.nn.Embedding)
        ]
        return torch.randint(0, min(rows, default=2), shape, device=device).to(dtype)


def _filled(
    graph: LayerGraph, layer: Layer, precision: str, world: World, tp: int
) -> torch.nn.Module:
    """The layer on this device with weights, floating ones in the dtype that layers compute in."""
    from ..runtime.apply.tensor import Tp, split
    from .silent import Silent

    module = graph.build(layer.name).to_empty(device=world.device)
    graph.initialise(layer.name, module, seed=0)
    for weight in module.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(compute_dtype(precision))
    if tp > 1:
        plan = graph.tensor_plan(layer.name)
        assert plan is not None, "only layers that can be cut are measured in parts"
        split(module, plan, Tp(rank=0, degree=tp, group=None, traffic=Silent()))
    return module


def _measure_kind(
    stand: _Stand, saved: SavedBytes, sizes: tuple[int, ...], budget_s: float
) -> PassTimes:
    """One microbatch after another until a pass is long enough, or seconds or memory run out."""
    world = stand.world
    start_s = time.perf_counter()
    passes: list[Passes] = []
    spent_s = 0.0
    for size, after in zip(sizes, (*sizes[1:], 2 * sizes[-1]), strict=True):
        found = stand.timed(size)
        if found is None:
            break
        passes.append(found)
        if stand.tp == 1 and stand.head is not None:
            stand.hold(size)
        before_s, spent_s = spent_s, time.perf_counter() - start_s - stand.compiling_s
        next_s = after / size * found.device_s
        next_s += min(next_s * REPEATS, REPEAT_S)
        if stand.head is not None:  # most of what a size takes does not grow with it
            next_s += spent_s - before_s
        left_s = budget_s - largest(world, spent_s + next_s)
        if found.device_s > ENOUGH_S or left_s < 0 or not _fits(world, after * saved.saved):
            break
    if not passes:
        raise RunError(
            f'layer "{stand.layer.name}" ran out of memory on one sample; a device must hold one '
            "layer and one sample to measure it"
        )
    return PassTimes(
        microbatch=sizes[: len(passes)],
        forward_s=tuple(each.forward_s for each in passes),
        backward_s=tuple(each.backward_s for each in passes),
        host_s=stand.usual_host_s(passes) if stand.head is not None else None,
    )


def _fits(world: World, need_bytes: int) -> bool:
    """Whether every process has room for so much; host memory is shared by its processes."""
    free_bytes = world.accelerator.free_bytes() * MEMORY_SHARE
    if world.accelerator.on_host:
        need_bytes *= world.n_local
    return not largest(world, float(need_bytes > free_bytes))
