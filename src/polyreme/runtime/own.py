"""What each worker of an algorithm has of its own, as named tensors: for checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..algo.vector import mean
from . import pieces
from .pieces import Index, Reader

PREFIX = "worker/"
_LINKS = "exchange/topology/"  # state of links to others, who are others now
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def named(state: Mapping[str, Any], rank: int, part: str = "") -> dict[str, torch.Tensor]:
    """All tensors and numbers of a worker's state; numbers as tensors without dimension.

    `part` sets the processes of one worker apart.
    """
    return {f"{PREFIX}{rank}/{part}{path}": _tensor(leaf) for path, leaf in _leaves(state)}


def apart(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same of one player, where no tensor shares memory with another."""
    return {name: tensor.clone() for name, tensor in named(state, 0).items()}


def joined(tensors: Mapping[str, torch.Tensor], template: Mapping[str, Any]) -> Any:
    """The state that `apart` gave these tensors of; `template` says of which form."""
    return _rebuilt(template, lambda path, leaf: _as(leaf, tensors[f"{PREFIX}0/{path}"]))


def n_workers(index: Index) -> int:
    """Of how many workers a checkpoint holds the state."""
    found = (re.match(rf"{PREFIX}(\d+)/", name) for name in index.tensors)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def read(reader: Reader, template: Mapping[str, Any], rank: int, part: str = "") -> Any:
    """A worker's state as it was; `template` says of which form."""

    def one(path: str, leaf: Any) -> Any:
        return _as(leaf, _read(reader, f"{PREFIX}{rank}/{part}{path}", leaf))

    return _rebuilt(template, one)


def shared(reader: Reader, index: Index, template: Mapping[str, Any], part: str = "") -> Any:
    """The state of any worker where their number has changed: the mean of what all had.

    What has another shape for another number of workers, and what belongs to links between
    them, is as in `template`: that of a beginning at the mean parameters. Counts are the first
    worker's; a flag is set where it was for any.
    """
    n = n_workers(index)
    if not n:  # weights alone, or plain training
        return template

    def one(path: str, leaf: Any) -> Any:
        names = [f"{PREFIX}{rank}/{part}{path}" for rank in range(n)]
        shape = tuple(_tensor(leaf).shape)
        alike = all(name in index.tensors and index.tensors[name].shape == shape for name in names)
        if path.startswith(_LINKS) or not alike:
            return leaf
        tensor = _tensor(leaf)
        each = (_read(reader, name, leaf) for name in names)
        if tensor.dtype == torch.bool:
            return _as(leaf, torch.stack(list(each)).any(0))
        return _as(leaf, mean(each) if tensor.is_floating_point() else next(each))

    return _rebuilt(template, one)


def unlike(index: Index, template: Mapping[str, Any], rank: int, part: str = "") -> Iterator[str]:
    """Why a worker's state of this form cannot be read from there."""
    here = named(template, rank, part)
    for name in index.tensors:
        if name.startswith(f"{PREFIX}{rank}/{part}") and name not in here:
            yield f"{name} is unknown here"
    for name, tensor in here.items():
        stored = index.tensors.get(name)
        if stored is None:
            yield f"{name} is not in it"
        elif stored.shape != tuple(tensor.shape):
            yield f"{name} is {list(stored.shape)} there and {list(tensor.shape)} here"


def unlike_any(index: Index, template: Mapping[str, Any], part: str = "") -> Iterator[str]:
    """The same where there were more or fewer workers, whose links are not compared."""
    start = f"{PREFIX}0/{part}"
    there = {name for name in index.tensors if name.startswith(start)}
    here = set(named(template, 0, part))
    for name in sorted(there ^ here):
        if not name.startswith(start + _LINKS):
            yield f"{name} is {'unknown here' if name in there else 'not in it'}"


def _read(reader: Reader, name: str, leaf: Any) -> torch.Tensor:
    into = torch.empty_like(_tensor(leaf))
    reader.fill(pieces.whole(name, into))
    return into


def _leaves(state: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}/")
        else:
            yield f"{above}{key}", value


def _rebuilt(template: Mapping[str, Any], one: Any, above: str = "") -> dict[str, Any]:
    return {
        key: _rebuilt(value, one, f"{above}{key}/")
        if isinstance(value, Mapping)
        else one(f"{above}{key}", value)
        for key, value in template.items()
    }


def _tensor(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, torch.Tensor):
        return leaf
    assert type(leaf) in _NUMBERS, f"a state holds tensors and numbers, not {type(leaf)}"
    return torch.tensor(leaf, dtype=_NUMBERS[type(leaf)])


def _as(leaf: Any, tensor: torch.Tensor) -> Any:
    """The tensor in the leaf's form: a tensor, or a number."""
    return tensor.to(leaf.device) if isinstance(leaf, torch.Tensor) else type(leaf)(tensor.item())
