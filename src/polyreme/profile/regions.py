"""Which tensors that a layer saves tensor parts divide, and which each of them has whole."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..graph.tensor import Region, TensorPlan

if TYPE_CHECKING:
    import torch
    from torch import nn


class Regions:
    """Watches a layer's pass: which regions it is in, and which storages they have read."""

    def __init__(self, plan: TensorPlan | None) -> None:
        self._regions = () if plan is None else plan.regions
        self._depth = 0
        self._read: dict[int, torch.Tensor] = {}
        self._inside: set[int] = set()

    @property
    def read(self) -> set[int]:
        """Storages that regions read."""
        return set(self._read)

    @property
    def inside(self) -> set[int]:
        """Storages that regions save of what they make themselves."""
        return self._inside - set(self._read)

    def saved(self, tensor: torch.Tensor) -> None:
        """A tensor is saved for the first time."""
        if self._depth:
            self._inside.add(storage(tensor))

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Passes of the module in here are watched."""
        handles: list[Any] = []
        for region in self._regions:
            entry = module.get_submodule(region.entry)
            enter = self._enter(entry, region)
            handles.append(entry.register_forward_pre_hook(enter, with_kwargs=True))
            left = entry if region.exit is None else module.get_submodule(region.exit)
            handles.append(left.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, entry: nn.Module, region: Region) -> Any:
        names = list(inspect.signature(entry.forward).parameters)
        wanted = [names[0] if each.argument is None else each.argument for each in region.reads]

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            for name in wanted:
                self._read[storage(given[name])] = given[name]
            self._depth += 1

        return before

    def _leave(self, *_: Any) -> None:
        self._depth -= 1


def storage(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory from all others that are alive."""
    return int(tensor.untyped_storage()._cdata)
