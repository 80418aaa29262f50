"""An accelerator over host memory that counts bytes of live tensors, as an allocator would."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from behind import Behind


class Counted(TorchDispatchMode):
    """Storages that operators made in here, and the most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {self._key(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if _is_tensor(each) and self._key(each) not in before:
                self._note(each.untyped_storage())
        return found

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _note(self, storage: Any) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self.live:
            return
        self.live[key] = n_bytes
        self.now += n_bytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class Counting(Behind):
    """Says of its memory what `counted` has seen."""

    counted: Counted

    def allocated_bytes(self) -> int:
        return self.counted.now

    def peak_bytes(self) -> int:
        return self.counted.most

    def reset_peak(self) -> None:
        self.counted.most = self.counted.now


@contextmanager
def counting() -> Iterator[Counting]:
    """One that counts while this lasts."""
    entry = Counting(name="counting")
    with Counted() as counted:
        object.__setattr__(entry, "counted", counted)
        yield entry
