"""Layers that are alike and run alike, counted: prices are found once for each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from ..graph.layer import LayerGraph
from .draft import Draft, Strategy
from .shapes import LayerShapes, read_shapes


class LayerClass(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one kind that own the same parameters."""

    kind: str
    shapes: LayerShapes


class Groups(msgspec.Struct, frozen=True, kw_only=True):
    """(index of a class, strategy) -> how many; units also with which pairs are neighbours.

    A unit is what is gathered and reduced together: a layer, or layers tied to each other. The
    `tail` is the unit of the last layer, which stays gathered between its two passes; it `spans`
    the whole model if it is tied to an earlier layer.
    """

    layers: tuple[tuple[int, Strategy, int], ...]
    units: tuple[tuple[int, Strategy, int], ...]
    neighbours: tuple[tuple[tuple[int, Strategy], tuple[int, Strategy]], ...]
    tail: tuple[int, Strategy]
    spans: bool


class Classes:
    """The classes of a model's layers and units, each under an index."""

    def __init__(self, graph: LayerGraph, tp: int = 1) -> None:
        shapes = read_shapes(graph, tp)
        self.shapes = shapes
        layer_classes = [
            LayerClass(kind=layer.kind, shapes=shapes[layer.name]) for layer in graph.layers
        ]
        self.layers = tuple(dict.fromkeys(layer_classes))
        index_of = {each: index for index, each in enumerate(self.layers)}
        self.layer_of = {
            layer.name: index_of[each]
            for layer, each in zip(graph.layers, layer_classes, strict=True)
        }
        members = tied_units(graph)
        units = [tuple(self.layer_of[name] for name in names) for names in members]
        last = graph.layers[-1].name
        self._members = members
        self._tail = next(index for index, names in enumerate(members) if last in names)
        self.units = tuple(dict.fromkeys(units))
        self._unit_indices = tuple(self.units.index(unit) for unit in units)
        self._uniform: dict[Strategy, Groups] = {}

    def groups(self, draft: Draft, held: Sequence[str] | None = None) -> Groups:
        """The groups of a draft (of the layers that are held), in the order of first members."""
        strategies = {id(strategy): strategy for strategy in draft.strategies.values()}
        if len(strategies) > 1 or held is not None:
            return self._count(draft, held)
        (strategy,) = strategies.values()
        if strategy not in self._uniform:
            self._uniform[strategy] = self._count(draft)
        return self._uniform[strategy]

    def _count(self, draft: Draft, held: Sequence[str] | None = None) -> Groups:
        how = draft.strategies
        here = set(how if held is None else held)
        layers = [(index, how[name]) for name, index in self.layer_of.items() if name in here]
        kept = [
            (index, _of_unit([how[name] for name in names]), number == self._tail)
            for number, (names, index) in enumerate(
                zip(self._members, self._unit_indices, strict=True)
            )
            if here & set(names)
        ]
        units = [(index, strategy) for index, strategy, _ in kept]
        tails = [at for at, (_, _, is_tail) in enumerate(kept) if is_tail]
        tail = tails[0] if tails else len(units) - 1
        return Groups(
            layers=_counted(layers),
            units=_counted(units),
            neighbours=tuple(dict.fromkeys(pairwise(units))),
            tail=units[tail],
            spans=tail < len(units) - 1,
        )


def _of_unit(strategies: Sequence[Strategy]) -> Strategy:
    """That of the first layer; recomputed if any layer is."""
    first = strategies[0]
    if first.recompute or not any(each.recompute for each in strategies):
        return first
    return msgspec.structs.replace(first, recompute=True)


def _counted(keys: Iterable[tuple[int, Strategy]]) -> tuple[tuple[int, Strategy, int], ...]:
    return tuple((index, strategy, count) for (index, strategy), count in Counter(keys).items())


def tied_units(graph: LayerGraph, held: Iterable[str] | None = None) -> tuple[tuple[str, ...], ...]:
    """Names of layers (that are held) which share parameters, else each alone, by their first."""
    here = None if held is None else set(held)
    home: dict[str, str] = {}  # of a parameter: the first layer of the unit that has it
    units: dict[str, list[str]] = {}
    for layer in graph.layers:
        if here is not None and layer.name not in here:
            continue
        homes = {home[whole] for whole in layer.ties if whole in home}
        first, *others = [name for name in units if name in homes] or [layer.name]
        units.setdefault(first, []).append(layer.name)
        for other in others:
            units[first] += units.pop(other)
        joined = {first, *others}
        home = {whole: first if at in joined else at for whole, at in home.items()}
        for whole in layer.params.values():
            home.setdefault(whole, first)
    return tuple(tuple(names) for names in units.values())
