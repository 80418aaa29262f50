"""Plays the actions of a plan on the stages of this process.

A forward pass keeps what went into a stage and came out of it; a backward pass gives gradients of
the former for gradients of the latter. The halves of a backward pass are told apart at matrix
products and tables: the input half (I) leaves their weights' gradients to the weight half (W);
those of all other parameters come with the input half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..plan.ir import Action
from .applied import Applied, Unit
from .bucket import Replicated
from .halves import Halves
from .passes import Microbatch, buffers_kept
from .slices import Slices
from .stash import Stash
from .wires import Wires, given, taken


@dataclass(frozen=True, kw_only=True)
class _Passed:
    """What a stage keeps between the passes of a microbatch."""

    taken: Sequence[torch.Tensor]
    given: Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class _Final:
    """Whose last gradients of the step an action brings."""

    parameters: tuple[Replicated, ...]
    units: tuple[Unit, ...]


_Key = tuple[int, int, int, int]  # stage, microbatch, copy, token slice


class Executor:
    """Plays a step's actions; `recorded` are those of the last step, as they were played."""

    def __init__(self, applied: Applied) -> None:
        self.applied = applied
        self.recorded: list[Action] = []
        self.stash = Stash(applied) if _stashes(applied.orders) else None
        kept = "FBIWU" if self.stash is not None else "FBIW"  # else the driver updates at the end
        self._orders = [tuple(a for a in actions if a.kind in kept) for actions in applied.orders]
        self._wires = Wires(applied)
        self._n_stages = len(applied.grid.holders)
        self._halves: Halves | None = None
        if any(action.kind == "W" for action in self._own):
            self._halves = Halves(_whole_layers(applied))
        self._slices = Slices(applied) if applied.slices else None
        self._finals: dict[tuple[int, ...], dict[int, _Final]] = {}
        self._passed: dict[_Key, _Passed] = {}

    @property
    def _own(self) -> Sequence[Action]:
        return self._orders[self.applied.places.cell.pipe]

    def __call__(
        self, microbatches: Mapping[int, Microbatch], nominal_weight: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the summed loss over `nominal_weight`; that loss, labels that carry it.

        Both are zero on a process that has no part of the loss of its own.
        """
        applied = self.applied
        applied.buckets.begin()
        self._wires.begin(self._orders, {n: m.n_rows for n, m in microbatches.items()})
        sums = torch.zeros(2, dtype=torch.float64, device=applied.device)
        actions = [action for action in self._own if action.microbatch in microbatches]
        if self.stash is not None:
            self.stash.begin(len(microbatches))
        finals = self._final_of(actions)
        self.recorded = []
        for index, action in enumerate(actions):
            if index + 1 < len(actions):
                self._ask(actions[index + 1])
            if action.kind == "U":
                assert self.stash is not None, "all other updates are the driver's"
                self.stash.update(action)
            elif action.kind == "F":
                self._forward(action, microbatches[action.microbatch], nominal_weight, sums)
            else:
                self._backward(action, finals.get(index, _NOTHING))
            self.recorded.append(action)
        self._wires.end()
        if self._slices is not None:
            self._slices.rest()
        if self.stash is not None:
            self.stash.rest()
        else:
            applied.finish()
        return sums[0], sums[1]

    def _forward(
        self,
        action: Action,
        microbatch: Microbatch,
        nominal_weight: float,
        sums: torch.Tensor,
    ) -> None:
        stage, applied = action.stage, self.applied
        if self._slices is not None:
            microbatch = self._slices.begin(action, microbatch)
        if self.stash is not None:
            self.stash.forward(action)
        message = taken(action, self._n_stages)
        came = [] if message is None else self._wires.take(message)
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in came]
        with buffers_kept(applied, fillers_only=True) as restore:
            if self._halves is None:
                out = applied.stage(microbatch.fields, *inputs, number=stage)
            else:
                with self._halves.watching():
                    out = applied.stage(microbatch.fields, *inputs, number=stage)
            if not microbatch.n_samples:
                restore()
        after = given(action, self._n_stages)
        if after is None:
            total, count = applied.score(out, microbatch.labels)
            sums += torch.stack([total.detach().double(), count.double()])
            outputs: Sequence[torch.Tensor] = (total / nominal_weight,)
        else:
            outs = out if isinstance(out, tuple) else (out,)
            forms = applied.forms[stage]
            outputs = [t.to(dtype) for t, (dtype, _) in zip(outs, forms, strict=True)]
            self._wires.send(after, [t.detach() for t in outputs])
        self._passed[_key(action)] = _Passed(taken=inputs, given=outputs)

    def _backward(self, action: Action, final: _Final) -> None:
        applied = self.applied
        if self.stash is None:  # else gradients are summed with each update
            applied.buckets.expect_last(final.parameters)
        if action.kind == "W":
            assert self._halves is not None
            self._halves.play(_key(action))
        else:
            applied.begin_backward(self._units(action.stage), final.units)
            self._whole(action)
        if self.stash is None:
            applied.buckets.passed(final.parameters)

    def _whole(self, action: Action) -> None:
        """A backward pass, or its input half."""
        passed = self._passed.pop(_key(action))
        more = ([], []) if self._slices is None else self._slices.end(action)
        message = taken(action, self._n_stages)
        if message is None:
            outputs: list[Any] = [out for out in passed.given if out.requires_grad]
            gradients: list[Any] = [None] * len(outputs)
        else:
            came = self._wires.take(message)
            pairs = [
                (out, gradient)
                for out, gradient in zip(passed.given, came, strict=True)
                if out.requires_grad
            ]
            outputs, gradients = [out for out, _ in pairs], [gradient for _, gradient in pairs]
        outputs, gradients = [*outputs, *more[0]], [*gradients, *more[1]]
        if self._halves is not None:
            with self._halves.leaving(_key(action) if action.kind == "I" else None):
                _autograd(outputs, gradients)
        else:
            _autograd(outputs, gradients)
        after = given(action, self._n_stages)
        if after is not None:
            self._wires.send(
                after, [torch.zeros_like(t) if t.grad is None else t.grad for t in passed.taken]
            )

    def _ask(self, action: Action) -> None:
        message = taken(action, self._n_stages)
        if message is not None:
            self._wires.ask(message)

    def _units(self, stage: int) -> list[Unit]:
        """Units of a stage, in the order in which its forward pass is through with them."""
        names = self.applied.stage.chunks[stage].layers
        ends = [
            (max(at for at, name in enumerate(names) if name in unit.layers), unit)
            for unit in self.applied.units
            if not set(names).isdisjoint(unit.layers)
        ]
        return [unit for _, unit in sorted(ends, key=lambda each: each[0])]

    def _final_of(self, actions: Sequence[Action]) -> dict[int, _Final]:
        """By the index of an action, whose last gradients come with it."""
        key = tuple(sorted({action.microbatch for action in actions}))
        if key not in self._finals:
            self._finals[key] = self._find_finals(actions)
        return self._finals[key]

    def _find_finals(self, actions: Sequence[Action]) -> dict[int, _Final]:
        chunks = self.applied.stage.chunks
        stage_of = {name: stage for stage, chunk in chunks.items() for name in chunk.layers}
        last = {a.stage: index for index, a in enumerate(actions) if a.kind in "BIW"}
        last_unit = {a.stage: index for index, a in enumerate(actions) if a.kind in "BI"}
        found: dict[int, tuple[list[Replicated], list[Unit]]] = {}
        layers = self.applied.layers_of
        for parameter in self.applied.buckets.parameters:
            stages = {stage_of[name] for name in layers[parameter.name]}
            at = max(last.get(stage, -1) for stage in stages)
            found.setdefault(at, ([], []))[0].append(parameter)
        for unit in self.applied.units:
            stages = {stage_of[name] for name in unit.layers}
            at = max(last_unit.get(stage, -1) for stage in stages)
            found.setdefault(at, ([], []))[1].append(unit)
        return {
            index: _Final(parameters=tuple(parameters), units=tuple(units))
            for index, (parameters, units) in found.items()
        }


def _autograd(outputs: list[Any], gradients: list[Any]) -> None:
    if outputs:  # else all before them is frozen
        torch.autograd.backward(outputs, gradients)


_NOTHING = _Final(parameters=(), units=())


def _stashes(orders: Sequence[Sequence[Action]]) -> bool:
    """Whether updates come between the passes of a step."""
    return any(action.weight_version for actions in orders for action in actions)


def _key(action: Action) -> _Key:
    return action.stage, action.microbatch, action.copy, action.token_slice


def _whole_layers(applied: Applied) -> frozenset[int]:
    """Parameters whose gradients may wait for the weight half: of layers that are not sharded.

    Nor are they recomputed, since that pass would be watched a second time.
    """
    sharded = {name for unit in applied.units for name in unit.layers}
    can: set[int] = set()
    cannot: set[int] = set()
    for name, body in zip(applied.stage.names, applied.stage.bodies, strict=True):
        found = cannot if name in sharded or body.recompute else can
        found |= {id(parameter) for parameter in body.parameters()}
    return frozenset(can - cannot)
