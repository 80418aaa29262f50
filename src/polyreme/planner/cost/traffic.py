"""All that a device exchanges in a step, counted: what the times of exchanges are made of.

It follows from the shapes of the graph and from the draft alone. An order that updates between its
passes exchanges gradients with each update, which is not counted.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ...plan.grid import Cell
from ...plan.ir import Action, accumulation_order
from ...plan.order import ORDERS
from ..draft import Draft, Strategy
from ..held import Held, HeldParam, HeldUnit, buckets, held_by
from .expert import dealt_out
from .memory import Memory
from .message import Message, Messages, Operation, Over
from .slices import even_slices
from .tensor import TensorParts
from .unit import Unit, count_unit, count_units

FILLER_SAMPLES = 2  # of a microbatch for which a device has no sample, where it must take part
# Each device tells the others whether its loss and gradients are finite, and six numbers; loss,
# labels and the norm's squares are of all; each trainable tensor of the model has a flag.
TOLD_OF_ALL, TOLD_BY_EACH, TOLD_WIDTH = 3, 8, 8
_HALVES: tuple[Operation, ...] = ("reduce_scatter", "all_gather")


class Traffic:
    """What a device exchanges in a step of any draft of one model."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.parts = TensorParts(memory.graph, memory.widths)
        self.held = functools.cache(self._held)
        self._unit = functools.cache(self._count_unit)
        self._n_trainable = functools.cache(self._trainable)
        self._pipes = functools.cache(self._holders)
        self._crossings = functools.cache(self._all_crossings)
        self._buckets: dict[Any, tuple[Message, ...]] = {}

    def __call__(self, draft: Draft, cell: Cell) -> Messages:
        """Messages of a step of the device at a cell, by what they are.

        A draft with stages must have its actions.
        """
        found = self.beside_buckets(draft, cell)
        found.update(self.buckets(draft, draft.layers_of(cell.pipe)))
        return found

    def beside_buckets(self, draft: Draft, cell: Cell) -> Messages:
        """The same without gradients that are whole on every device."""
        found: Messages = Counter()
        passes = Counter(self._passes(draft, cell))
        for (stage, copy, forward, size, n_tokens), count in passes.items():
            names = draft.stages[stage] if draft.stages else tuple(draft.strategies)
            for message in self._in_pass(draft, names, size, n_tokens, forward=forward):
                found[message] += count
            if forward and stage == len(draft.holders) - 1:
                found.update(dict.fromkeys(self.parts.loss(draft.strategy, size, n_tokens), count))
            for n_bytes in self._handed(draft, cell, stage, copy, size, n_tokens, forward=forward):
                found[_message("send", "stages", 2, n_bytes)] += count
        found.update(self._of_units(draft, cell))
        found.update(self._of_holders(draft, cell))
        if draft.n_devices > 1:
            told = TOLD_OF_ALL + TOLD_BY_EACH * draft.n_devices + self._n_trainable()
            found[_message("all_reduce", "all", draft.n_devices, told * TOLD_WIDTH)] += 1
        return found

    def handed_on(self, draft: Draft, stage: int, size: int) -> list[Message]:
        """What a stage hands on of a whole microbatch of so many samples."""
        sizes = self._values(draft, stage, 0, size, None)
        return [_message("send", "stages", 2, n_bytes) for n_bytes in sizes]

    def crossing(self, cut: int, strategy: Strategy, size: int) -> tuple[Message, ...]:
        """What crosses a cut behind the layer of that index, a microbatch of so many samples."""
        return tuple(
            _message("send", "stages", 2, math.ceil(size * n_bytes / strategy.cp))
            for n_bytes in self._crossings(strategy.tp, strategy.sp)[cut]
        )

    def buckets(self, draft: Draft, names: tuple[str, ...]) -> tuple[Message, ...]:
        """Of each bucket of gradients that are whole on every device with these layers, in order.

        Decoupled ones are scattered and gathered, padded to as many equal parts as there are
        devices; not those in which several have a share.
        """
        n_ranks, held = draft.strategy.sharers, self.held(names)
        if n_ranks == 1:
            return ()
        how = {unit.layers[0]: draft.strategies[unit.layers[0]] for unit in held.units}
        cut = frozenset(first for first, each in how.items() if each.parts > 1)
        dealt = tuple((first, each) for first, each in how.items() if each.ep > 1)
        joint: frozenset[str] = frozenset()
        if draft.decouple:
            joint = frozenset(param.name for _, param in self._joint(draft, names))
        key = (names, cut, dealt, draft.bucket_bytes, n_ranks, draft.decouple, joint)
        if key not in self._buckets:
            self._buckets[key] = tuple(
                message
                for ep, part in dealt_out(held, dict(dealt))
                for message in self._in_buckets(draft, part, cut, joint, n_ranks // ep, ep)
            )
        return self._buckets[key]

    def _in_buckets(
        self,
        draft: Draft,
        held: Held,
        cut: frozenset[str],
        joint: frozenset[str],
        n_ranks: int,
        ep: int,
    ) -> Iterator[Message]:
        """Of buckets that so many devices sum."""
        if n_ranks == 1:
            return
        sizes = functools.partial(buckets, held, cut, self.memory.widths.master, draft.bucket_bytes)
        step = n_ranks * self.memory.widths.master
        for n_bytes in sizes(lambda name: bool(draft.decouple) and name not in joint):
            for operation in _HALVES:
                yield _message(operation, "data", n_ranks, -(-n_bytes // step) * step, ep)
        for n_bytes in sizes(lambda name: not draft.decouple or name in joint):
            yield _message("all_reduce", "data", n_ranks, n_bytes, ep)

    # Passes

    def _actions(self, draft: Draft, cell: Cell) -> tuple[Action, ...]:
        """Of a device, those of microbatches that it plays."""
        if not draft.stages:
            own = accumulation_order(draft.microbatches)
        else:
            assert draft.actions, "a draft with stages has actions"
            own = draft.actions[cell.pipe]
        sizes = self._sizes(draft, cell)
        return tuple(each for each in own if each.kind in "FBI" and sizes[each.microbatch])

    def _sizes(self, draft: Draft, cell: Cell) -> list[int]:
        """Samples of each microbatch; fillers where there are none and others need this device."""
        strategy = draft.strategy
        of_replica = _share(draft.global_batch, cell.replica, strategy.replica)
        own = _share(of_replica, cell.shard, strategy.shard)
        fills = any(each.parts > 1 for each in draft.strategies.values()) or (
            strategy.tp > 1 and strategy.data > 1
        )
        sizes = [_share(own, number, draft.microbatches) for number in range(draft.microbatches)]
        return [size or (FILLER_SAMPLES if fills else 0) for size in sizes]

    def _passes(self, draft: Draft, cell: Cell) -> Iterator[tuple[int, int, bool, int, int | None]]:
        """(stage, copy, whether forward, samples, tokens of a slice) of each pass."""
        sizes, lengths = self._sizes(draft, cell), self._lengths(draft)
        for each in self._actions(draft, cell):
            n_tokens = lengths[each.token_slice] if lengths else None
            yield each.stage, each.copy, each.kind == "F", sizes[each.microbatch], n_tokens

    def _lengths(self, draft: Draft) -> tuple[int, ...]:
        """Tokens of each slice; none where passes are over all tokens, or a model has none."""
        if draft.order in ORDERS and ORDERS[draft.order].slices == 1:
            return ()
        n = 1 + max((each.token_slice for own in draft.actions for each in own), default=0)
        tokens = self.memory.graph.inputs.get("input_ids")
        if n == 1 or tokens is None:
            return ()
        return draft.token_slices or even_slices(tokens.shape[0], n)

    # Tensor parts and stages

    def _in_pass(
        self,
        draft: Draft,
        names: tuple[str, ...],
        size: int,
        n_tokens: int | None,
        *,
        forward: bool,
    ) -> Iterator[Message]:
        for name in names:
            found = self.parts.exchanges(name, draft.strategies[name], size, n_tokens)
            yield from found.forward if forward else (*found.again, *found.backward)

    def _handed(
        self,
        draft: Draft,
        cell: Cell,
        stage: int,
        copy: int,
        size: int,
        n_tokens: int | None,
        *,
        forward: bool,
    ) -> list[int]:
        """Bytes of each tensor that leaves the device after a pass."""
        to = stage + 1 if forward else stage - 1
        if not 0 <= to < len(draft.holders) or draft.holders[to][copy] == cell.pipe:
            return []
        return self._values(draft, min(stage, to), cell.tp, size, n_tokens)

    def _values(
        self, draft: Draft, stage: int, part: int, size: int, n_tokens: int | None
    ) -> list[int]:
        """Bytes of each value that crosses the cut behind a stage."""
        graph, strategy = self.memory.graph, draft.strategy
        before = [name for names in draft.stages[: stage + 1] for name in names]
        after = [name for names in draft.stages[stage + 1 :] for name in names]
        read = {value for name in after for value in graph.layer(name).inputs}
        found = []
        for name in before:
            plan = graph.tensor_plan(name)
            for output, spec in graph.layer(name).outputs.items():
                if f"{name}.{output}" not in read:
                    continue
                shape = tuple(spec.shape)
                if plan is not None:
                    shape = plan.output_shape(output, shape, strategy.tp, part, sp=strategy.sp)
                if n_tokens is not None:
                    shape = (n_tokens, *shape[1:])
                n_bytes = size * math.prod(shape) * self._width(spec.dtype)
                found.append(math.ceil(n_bytes / strategy.cp))
        return found

    def _all_crossings(self, tp: int, sp: bool) -> tuple[tuple[int, ...], ...]:
        """Bytes a sample of each value that crosses each cut, of the first tensor part."""
        graph = self.memory.graph
        reader = {
            value: index for index, layer in enumerate(graph.layers) for value in layer.inputs
        }
        found: list[list[int]] = [[] for _ in graph.layers[1:]]
        for index, layer in enumerate(graph.layers):
            plan = graph.tensor_plan(layer.name)
            for output, spec in layer.outputs.items():
                shape = tuple(spec.shape)
                if plan is not None:
                    shape = plan.output_shape(output, shape, tp, 0, sp=sp)
                n_bytes = math.prod(shape) * self._width(spec.dtype)
                for cut in range(index, reader.get(f"{layer.name}.{output}", index)):
                    found[cut].append(n_bytes)
        return tuple(map(tuple, found))

    def _width(self, dtype: str) -> int:
        """Bytes of an element of that name; a bool takes one."""
        if dtype == "compute":
            return self.memory.widths.compute
        return int("".join(filter(str.isdigit, dtype)) or 8) // 8

    # Data axes

    def _held(self, names: tuple[str, ...]) -> Held:
        return held_by(self.memory.graph, self.memory.classes.shapes, names)

    def units(self, held: HeldUnit, strategy: Strategy) -> tuple[Unit, ...]:
        """What of it is gathered and reduced together: all, or its experts apart."""
        if strategy.ep > 1:
            return count_units(held.params, strategy, looks_up=held.looks_up)
        return (self._unit(held, strategy.parts),)

    def _count_unit(self, unit: HeldUnit, parts: int) -> Unit:
        return count_unit(unit.params, parts, looks_up=unit.looks_up)

    def _of_units(self, draft: Draft, cell: Cell) -> Messages:
        """Of parameters that are cut into shards."""
        found: Messages = Counter()
        wide = self.memory.widths
        actions = self._actions(draft, cell)
        stage_of = {name: stage for stage, names in enumerate(draft.stages) for name in names}
        for held in self.held(draft.layers_of(cell.pipe)).units:
            how = draft.strategies[held.layers[0]]
            if how.parts == 1:
                continue
            stages = {stage_of.get(name, 0) for name in held.layers}
            again = any(draft.strategies[name].recompute for name in held.layers)
            n_gathered, n_backward = _gathered(
                [each for each in actions if each.stage in stages],
                kept=how.level != "params",
                stays=held.stays,
                looks_up=held.looks_up and not again,
            )
            for unit in self.units(held, how):
                if unit.parts == 1 or not unit.gathered:
                    continue
                ep, who = (how.ep, how.of_experts) if unit.experts else (1, how)
                gather = unit.gathered * wide.compute
                found[_message("all_gather", "shards", who.shard, gather, ep)] += n_gathered
                if unit.reduced and n_backward:
                    n_reduced = 1 if how.level == "optimizer" else n_backward
                    n_bytes = unit.reduced * wide.master
                    found[_message("reduce_scatter", "shards", who.shard, n_bytes, ep)] += n_reduced
                    if who.copies > 1:
                        own = n_bytes // unit.parts
                        found[_message("all_reduce", "replicas", who.copies, own, ep)] += 1
        return found

    def _of_holders(self, draft: Draft, cell: Cell) -> Messages:
        """Of gradients in which several tensor parts, or several pipeline ranks, have a share."""
        sums: dict[int | tuple[int, ...], int] = {}
        for who, param in self._joint(draft, draft.layers_of(cell.pipe)):
            parts = draft.strategies[param.unit].parts
            cut = parts > 1 and not param.shape.special
            own = param.shape.local_elements(parts, cell.shard) if cut else param.shape.n_elements
            sums[who] = sums.get(who, 0) + own
        width = self.memory.widths.master
        return Counter(
            _message("all_reduce", "holders", who if isinstance(who, int) else len(who), n * width)
            for who, n in sums.items()
        )

    def _joint(
        self, draft: Draft, names: tuple[str, ...]
    ) -> Iterator[tuple[int | tuple[int, ...], HeldParam]]:
        """Parameters with whom they are summed: so many tensor parts, or these pipeline ranks."""
        pipes_of = self._pipes(draft.stages, draft.holders)
        for param in self.held(names).params:
            shape, pipes = param.shape, pipes_of.get(param.name, ())
            if not shape.trainable:
                continue
            if shape.copies > 1 and (shape.partial_sp if draft.strategy.sp else shape.partial):
                yield shape.copies, param
            if len(pipes) > 1:
                yield pipes, param

    def _holders(
        self, stages: tuple[tuple[str, ...], ...], holders: tuple[tuple[int, ...], ...]
    ) -> Mapping[str, tuple[int, ...]]:
        """The pipeline ranks that hold each parameter."""
        found: dict[str, set[int]] = {}
        for names, pipes in zip(stages, holders, strict=False):
            for name in names:
                for whole in self.memory.graph.layer(name).params.values():
                    found.setdefault(whole, set()).update(pipes)
        return {whole: tuple(sorted(pipes)) for whole, pipes in found.items()}

    def _trainable(self) -> int:
        """Trainable tensors of the whole model."""
        params = self.held(tuple(layer.name for layer in self.memory.graph.layers)).params
        return sum(param.shape.trainable for param in params)


def _gathered(actions: list[Action], *, kept: bool, stays: bool, looks_up: bool) -> tuple[int, int]:
    """How often a unit is gathered in these passes, and how many of them go backward.

    One that is `kept` is gathered until its last backward pass; the one that `stays` until the
    next.
    """
    n_backward = sum(each.kind != "F" for each in actions)
    if kept:
        return min(1, len(actions)), n_backward
    n_gathered, is_whole = 0, False
    for each in actions:
        forward = each.kind == "F"
        if not is_whole and (forward or not looks_up):
            n_gathered += 1
        is_whole = forward and stays
    return n_gathered, n_backward


def _share(n: int, rank: int, n_ranks: int) -> int:
    """How many of n things are a rank's: as even as can be, the first ones have more."""
    each, left = divmod(n, n_ranks)
    return each + (rank < left)


def _message(operation: Operation, over: Over, n_ranks: int, n_bytes: int, ep: int = 1) -> Message:
    return Message(operation=operation, over=over, n_ranks=n_ranks, n_bytes=n_bytes, ep=ep)
