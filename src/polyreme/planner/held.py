"""What a pipeline rank holds of a model: its layers' parameters, and the units they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from ..graph.layer import LayerGraph
from .groups import tied_units
from .shapes import LayerShapes, ParamShape


class HeldParam(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter by its name in the whole model; `unit` is the first layer of its unit."""

    name: str
    unit: str
    shape: ParamShape


class HeldUnit(msgspec.Struct, frozen=True, kw_only=True):
    """Layers whose parameters are gathered and reduced together.

    One that only `looks_up` reads no parameter in its backward pass, unless it is recomputed;
    the one with the model's last layer `stays` gathered until then.
    """

    layers: tuple[str, ...]
    params: tuple[ParamShape, ...]
    looks_up: bool
    stays: bool


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """`params` each once, in the order of the first layers that have them."""

    params: tuple[HeldParam, ...]
    units: tuple[HeldUnit, ...]


def held_by(graph: LayerGraph, shapes: Mapping[str, LayerShapes], names: Sequence[str]) -> Held:
    """What a rank holds that has these layers, each with all its parameters."""
    found: dict[str, HeldParam] = {}
    units = []
    for layers in tied_units(graph, names):
        own: dict[str, ParamShape] = {}
        for layer in map(graph.layer, layers):
            for shape in shapes[layer.name].every:
                own.setdefault(layer.params[shape.own], shape)
        found |= {name: HeldParam(name=name, unit=layers[0], shape=own[name]) for name in own}
        units.append(
            HeldUnit(
                layers=layers,
                params=tuple(own.values()),
                looks_up=all(shapes[name].looks_up for name in layers),
                stays=layers[-1] == graph.layers[-1].name,
            )
        )
    here = set(names)
    ordered = [
        whole
        for layer in graph.layers
        if layer.name in here
        for shape in shapes[layer.name].every
        for whole in (layer.params[shape.own],)
    ]
    params = tuple(found[name] for name in dict.fromkeys(ordered))
    return Held(params=params, units=tuple(units))


def buckets(
    held: Held, cut: frozenset[str], width: int, close: int, only: Callable[[str], bool]
) -> tuple[int, ...]:
    """Bytes of each gradient bucket: parameters from last to first, closed at `close` bytes.

    Units of `cut` (by their first layers) are cut into shards, which leaves special ones;
    `width` is that of an element; `only` says which parameters count. The last bucket may be
    smaller.
    """
    found: list[int] = []
    for param in reversed(held.params):
        shape = param.shape
        if not shape.trainable or (param.unit in cut and not shape.special):
            continue
        if not only(param.name):
            continue
        if not found or found[-1] >= close:
            found.append(0)
        found[-1] += shape.n_elements * width
    return tuple(found)
