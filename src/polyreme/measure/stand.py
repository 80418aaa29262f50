"""A layer on this device with all that its passes take: what is timed, and what is held."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..graph.loss import cross_entropy
from ..profile.record import HostSeconds
from ..profile.saved import tensor_specs
from ..profile.trace import compute_dtype, tensor_dtype
from ..runtime.apply.tensor import Tp, split
from ..runtime.compiled import compile_layer, compile_loss, forget_compiled
from ..runtime.stage import Body
from ..sample import TensorSpec
from .agree import largest
from .inputs import lying
from .memory import PassBytes, drop_gradient, loss_bytes, pass_bytes
from .passes import LASTING_S, HeadStart, Passes, Play, Ran, ran_once, timed
from .silent import Silent

if TYPE_CHECKING:
    from ..graph.layer import Layer, LayerGraph
    from ..runtime.mesh import World

_IN_A_ROW = 4  # layers that follow one another while their host is timed
_HOST_SIZES = 2  # of which its seconds are the mean
_ROOM = 0.4  # of what is free may be taken by these layers


class Stand:
    """A layer, or its first of `tp` parts, on this device, with all that a pass takes.

    `apart_s` adds up what it took to compile it, its first passes included, and to time its host:
    seconds that are no part of any budget, as they do not grow with what is tried. `held` is what
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
        lasting_s: float = LASTING_S,
    ) -> None:
        self.layer = layer
        self.head = head
        self._strides = strides or {}
        self.gradient_host_s = gradient_host_s
        self._lasting_s = lasting_s
        self.world = world
        self.tp = tp
        self.compiled = compiled
        self.apart_s = 0.0
        self.held: list[PassBytes] = []
        self.loss_bytes: int | None = None
        self._made = partial(_filled, graph, layer, precision, world, tp)
        self.module = self._made()
        self.body = Body(self.module, recompute=False)
        self.shares: list[float] = []
        self.asked_s: list[list[tuple[float, float]]] = []
        if compiled:
            with self._apart():
                compile_layer(self.module)
        _drop_gradients(self.module)
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
            with self._apart():
                forget_compiled()

    def warm(self, microbatch: int, *, recompute: bool = False) -> Play:
        """What `play` gives, after first passes that compile, or have libraries begin."""
        with self._apart() if self.compiled else nullcontext():
            play = self.play(microbatch, [self.body], recompute=recompute)
            if self.compiled or not self.world.accelerator.on_host:
                play()
        return play

    @contextmanager
    def _apart(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.apart_s += time.perf_counter() - start_s

    def play(
        self, microbatch: int, bodies: Sequence[Body] = (), *, recompute: bool = False
    ) -> Play:
        """A function that asks for a forward and a backward pass of the layer, or of several."""
        bodies = bodies or [self.body]
        arguments = self._arguments(microbatch)
        weights = [weight for body in bodies for weight in body.parameters()]
        leaves = [each for each in (*weights, *arguments) if each.requires_grad]

        def end(body: Body) -> list[torch.Tensor]:
            out = body(*arguments)
            outputs = list(out) if isinstance(out, tuple) else [out]
            if self._logits is not None:
                logits = outputs[self._logits]
                labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
                outputs[self._logits] = self._score(logits, labels)[0]
            return [output for output in outputs if output.requires_grad]

        def ends() -> list[torch.Tensor]:
            return [output for body in bodies for output in end(body)]

        # Products of numbers that are all alike take less power, so a device does them faster.
        directions = [_direction(output) for output in ends()]

        def back(outputs: list[torch.Tensor]) -> None:
            if outputs:
                torch.autograd.backward(outputs, directions)

        def play() -> Ran:
            for leaf in leaves:
                leaf.grad = None
            for body in bodies:
                body.recompute = recompute
            ran = ran_once(self.world, ends, back)
            for body in bodies:
                body.recompute = False
            return ran

        return play

    def timed(self, microbatch: int) -> Passes | None:
        """Passes over such a microbatch; of a whole layer on an accelerator, recomputed ones too.

        Torch computes again no further than to the last tensor that the backward pass reads, and
        its hooks cost the host time.
        """
        recomputes = (False, True) if self.tp == 1 and self.head is not None else (False,)
        ways = [partial(self.warm, microbatch, recompute=each) for each in recomputes]
        found = timed(self.world, ways, self.head, self._lasting_s)
        if found is None:
            return None
        plain, *again = found
        for each in again:
            more_s = max(0.0, each.device_s - plain.device_s)
            self.shares.append(more_s / plain.forward_s if plain.forward_s else 1.0)
        if any(each.waits for each in found) and len(self.asked_s) < _HOST_SIZES:
            with self._apart():
                self.asked_s.append([self._in_a_row_s(microbatch, each) for each in recomputes])
        return plain

    def _in_a_row_s(self, microbatch: int, recompute: bool) -> tuple[float, float]:
        """What the host takes for both passes of a layer among others of its kind."""
        assert self.head is not None
        row = [self.body, *self._others()]
        forward_s, backward_s = self.head.host_s(
            self.world, self.play(microbatch, row, recompute=recompute)
        )
        return forward_s / len(row), backward_s / len(row)

    def _others(self) -> list[Body]:
        """Further layers of its kind, as far as weights and gradients of all of them find room.

        What is compiled of one is compiled of all.
        """
        own_bytes = sum(weight.nbytes for weight in self.module.parameters())
        room_bytes = self.world.accelerator.free_bytes() * _ROOM
        fit = min(_IN_A_ROW - 1, int(room_bytes // max(1, 2 * own_bytes)) - 1)
        others = [self._made() for _ in range(-int(largest(self.world, -max(0, fit))))]
        for each in others:
            if self.compiled:
                compile_layer(each)
            _drop_gradients(each)
        return [Body(each, recompute=False) for each in others]

    def hold(self, microbatch: int) -> None:
        """Have the allocator say what a pass holds, if no process runs out of memory."""
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

    @property
    def host_s(self) -> HostSeconds:
        """Of the host, which does the same for any size; none where the device waits at no size."""
        if not self.asked_s:
            return HostSeconds(forward=0.0, backward=0.0)
        forward_s, backward_s = _means([plain for plain, *_ in self.asked_s])
        again_s = [sum(each) for _, *more in self.asked_s for each in more]
        n_gradients = sum(weight.requires_grad for weight in self.module.parameters())
        return HostSeconds(
            forward=forward_s,
            backward=backward_s + n_gradients * self.gradient_host_s,
            recompute=max(0.0, statistics.mean(again_s) - forward_s - backward_s)
            if again_s
            else 0.0,
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


def _direction(output: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(output) if output.dim() else torch.ones_like(output)


def _drop_gradients(module: torch.nn.Module) -> None:
    for weight in module.parameters():
        if weight.requires_grad:
            hook: Any = drop_gradient
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _means(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(a for a, _ in pairs), statistics.mean(b for _, b in pairs)
