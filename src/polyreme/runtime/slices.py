"""Passes over slices of the tokens of a microbatch, each behind those before it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ..graph.prefix import Prefix
from .passes import Microbatch

if TYPE_CHECKING:
    import torch

    from ..plan.ir import Action
    from .applied import Applied


class Slices:
    """What stages keep between the slices of a microbatch."""

    def __init__(self, applied: Applied) -> None:
        self._spans = applied.slices
        self._prefixes: dict[tuple[int, int], Prefix] = {}
        self._readers: dict[int, list[Any]] = {
            number: [
                module
                for name in chunk.layers
                for module in applied.stage.body(name).modules()
                if hasattr(module, "prefix")
            ]
            for number, chunk in applied.stage.chunks.items()
        }

    def begin(self, action: Action, microbatch: Microbatch) -> Microbatch:
        """The slice of an action, with what came before it at hand in the stage."""
        start, stop = self._spans[action.token_slice]
        prefix = self._prefixes.setdefault((action.stage, action.microbatch), Prefix())
        prefix.start = start
        for module in self._readers[action.stage]:
            module.prefix = prefix
        return dataclasses.replace(
            microbatch,
            fields={name: field[:, start:stop] for name, field in microbatch.fields.items()},
            labels=microbatch.labels[:, start:stop],
        )

    def end(self, action: Action) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What later slices have read of this one, and their gradients of it."""
        key = (action.stage, action.microbatch)
        found = self._prefixes[key].pop()
        if action.token_slice == 0:
            del self._prefixes[key]
        return found

    def rest(self) -> None:
        """Leave the stages as they are without slices."""
        for modules in self._readers.values():
            for module in modules:
                module.prefix = None
