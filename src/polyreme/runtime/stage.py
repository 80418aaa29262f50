"""Layers of stages as one module, and where each parameter of the whole model lies in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from ..graph.layer import Layer, LayerGraph


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter or buffer of the whole model and the (module, attribute) places that hold it.

    Tied parameters have one slot with several places.
    """

    name: str
    layer: str
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def tensor(self) -> torch.Tensor:
        """What the first place holds now."""
        module, attribute = self.places[0]
        tensor: torch.Tensor = getattr(module, attribute)
        return tensor

    def put(self, parameter: nn.Parameter) -> None:
        """Place a parameter everywhere."""
        for module, attribute in self.places:
            setattr(module, attribute, parameter)


class Body(nn.Module):
    """A layer's module as the stage calls it: recomputed in the backward pass if so planned.

    `ran` says whether it was ever called.
    """

    def __init__(self, module: nn.Module, *, recompute: bool) -> None:
        super().__init__()
        self.module = module
        self.recompute = recompute
        self.ran = False
        self._before_first: list[Callable[[], None]] = []
        self._before: list[Callable[[], None]] = []

    def call_before_first(self, function: Callable[[], None]) -> None:
        """Call a function once, in the first forward pass, when all parameters are whole."""
        self._before_first.append(function)

    def call_before(self, function: Callable[[], None]) -> None:
        """Call a function before each forward pass."""
        self._before.append(function)

    def forward(self, *inputs: Any) -> Any:
        """The layer's outputs."""
        self.ran = True
        for function in self._before:
            function()
        while self._before_first:
            self._before_first.pop()()
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(
                self.module, *inputs, use_reentrant=False, context_fn=_under_same_modes
            )
        return self.module(*inputs)


def _under_same_modes() -> tuple[Any, Any]:
    """Contexts of a forward pass and of its recomputation, from which torch takes modes away."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    @contextmanager
    def recomputing() -> Iterator[None]:
        with ExitStack() as again:
            for mode in modes:
                again.enter_context(mode)
            yield

    return nullcontext(), recomputing()


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A stage of the plan: its layers, the values that it is handed and those that it hands on.

    A value that no layer here reads may pass through. The last stage gives the output alone.
    """

    layers: tuple[str, ...]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


def cut(graph: LayerGraph, stages: Sequence[Sequence[str]]) -> tuple[Chunk, ...]:
    """Stages with what crosses each cut: all that is made before it and read after it."""
    made = {value: at for at, names in enumerate(stages) for value in _made(graph, names)}
    last = dict.fromkeys(made, -1)
    for at, names in enumerate(stages):
        for name in names:
            last |= {value: at for value in graph.layer(name).inputs if value in made}
    crossing = [
        tuple(value for value, at in made.items() if at < border <= last[value])
        for border in range(len(stages))
    ]
    after = [*crossing[1:], (graph.output,)]
    return tuple(
        Chunk(layers=tuple(names), takes=takes, gives=gives)
        for names, takes, gives in zip(stages, crossing, after, strict=True)
    )


class Stage(nn.Module):
    """Layers called in the graph's order; an output is dropped after its last reader.

    `chunks` are the stages of the plan that lie here, by their numbers.
    """

    def __init__(
        self,
        graph: LayerGraph,
        bodies: Mapping[str, Body],
        dtype: torch.dtype,
        chunks: Mapping[int, Chunk],
    ) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies.values())
        self.names = tuple(bodies)
        self.chunks = dict(chunks)
        self._dtype = dtype
        self._output = graph.output
        self._fields = tuple(graph.inputs)
        at = {name: index for index, name in enumerate(bodies)}
        self._steps = {
            number: _steps([(graph.layer(name), at[name]) for name in chunk.layers], chunk)
            for number, chunk in chunks.items()
        }

    def body(self, name: str) -> nn.Module:
        """The body of a layer."""
        return self.bodies[self.names.index(name)]

    @property
    def reads(self) -> bool:
        """Whether samples are read here: by a layer, or for the loss of the last stage."""
        layers = [layer for steps in self._steps.values() for layer, _, _ in steps]
        fields = any(name.startswith("batch:") for layer in layers for name in layer.inputs)
        return fields or any(self._output in chunk.gives for chunk in self.chunks.values())

    def forward(
        self, batch: Mapping[str, torch.Tensor], *taken: torch.Tensor, number: int = 0
    ) -> Any:
        """What a stage gives: a tensor, or a tuple where it gives several.

        Floating fields of the batch are cast to the compute dtype.
        """
        chunk = self.chunks[number]
        values: dict[str, Any] = {
            f"batch:{name}": batch[name].to(self._dtype)
            if batch[name].is_floating_point()
            else batch[name]
            for name in self._fields
            if name in batch
        }
        values |= zip(chunk.takes, taken, strict=True)
        for layer, index, drop in self._steps[number]:
            result = self.bodies[index](*(values[name] for name in layer.inputs))
            names = _outputs(layer)
            if len(names) == 1:
                values[names[0]] = result
            else:
                values |= zip(names, result, strict=True)
            for name in drop:
                values.pop(name, None)
        given = tuple(values[name] for name in chunk.gives)
        return given[0] if len(given) == 1 else given


def _steps(
    layers: Sequence[tuple[Layer, int]], chunk: Chunk
) -> list[tuple[Layer, int, tuple[str, ...]]]:
    """Each layer, where its body is, and the values that nothing needs after it."""
    last: dict[str, int] = {}
    for number, (layer, _) in enumerate(layers):
        last |= dict.fromkeys((*layer.inputs, *_outputs(layer)), number)
    drop: list[list[str]] = [[] for _ in layers]
    for name, number in last.items():
        if name not in chunk.gives:
            drop[number].append(name)
    return [
        (layer, index, tuple(dropped)) for (layer, index), dropped in zip(layers, drop, strict=True)
    ]


def _made(graph: LayerGraph, names: Sequence[str]) -> list[str]:
    return [value for name in names for value in _outputs(graph.layer(name))]


def _outputs(layer: Layer) -> list[str]:
    return [f"{layer.name}.{output}" for output in layer.outputs]
