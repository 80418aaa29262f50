"""A whole layer's module made into one tensor part of it; what parts exchange is the caller's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .cut import Cut, Part, cuts_of, vocabulary_interval
from .tensor import Cutting, TensorPlan

Leave = Callable[[torch.Tensor], torch.Tensor]


def _unchanged(partial: torch.Tensor) -> torch.Tensor:
    return partial


def cut_module(
    module: nn.Module, plan: TensorPlan, part: Part, leave: Leave = _unchanged
) -> dict[str, Cut]:
    """Cut a layer's module to a part's sizes, in place; the cut of each parameter by name.

    The module is whole, with its values (or on meta). Parameters stay `nn.Parameter`s, and one
    object where they were one. `leave` sums over parts what a part finds in its rows of a table.
    """
    refusal = plan.refusal(part.degree)
    assert refusal is None, f"{part.degree} {refusal}"
    cuts = cuts_of(module, plan, part)
    if part.degree == 1:
        return cuts
    _cut_parameters(module, cuts)
    for number in plan.numbers:
        _set(module, number.path, number.name, number.local(part.degree))
    for setting in plan.settings:
        _set(module, setting.path, setting.name, setting.value)
    for cutting in plan.cuttings:
        found = module.get_submodule(cutting.path.rpartition(".")[0])
        held = getattr(found, cutting.path.rpartition(".")[2])
        if isinstance(held, nn.Embedding) and cutting.side == "vocabulary":
            _look_up_own_rows(held, cutting.runs[0].size, part, leave)
        elif cutting.side == "out" and isinstance(held, nn.Linear):
            _compute_own_rows(held, cutting, part)
    return cuts


def _cut_parameters(module: nn.Module, cuts: dict[str, Cut]) -> None:
    made: dict[int, nn.Parameter] = {}
    for name, tensor in list(module.named_parameters(remove_duplicate=False)):
        if cuts[name].dim is None:
            continue
        if id(tensor) not in made:
            own = cuts[name].take(tensor.detach())
            made[id(tensor)] = nn.Parameter(own, requires_grad=tensor.requires_grad)
        path, _, leaf = name.rpartition(".")
        child = module.get_submodule(path)
        setattr(child, leaf, made[id(tensor)])
        if leaf == "weight":
            _note_sizes(child)


def _note_sizes(child: Any) -> None:
    """Some modules keep their matrix's sizes beside it."""
    if isinstance(child, nn.Linear):
        child.out_features, child.in_features = child.weight.shape
    elif isinstance(child, nn.Embedding):
        child.num_embeddings, child.embedding_dim = child.weight.shape
    else:
        child.nx, child.nf = child.weight.shape  # the library's Conv1D


def _set(module: nn.Module, path: str, attribute: str, value: int) -> None:
    owner: Any = module.get_submodule(path)
    *through, name = attribute.split(".")
    for step in through:  # what is shared must not change for others
        own = copy.copy(getattr(owner, step))
        setattr(owner, step, own)
        owner = own
    assert hasattr(owner, name), f"{path} has no {attribute}"
    setattr(owner, name, value)


def _look_up_own_rows(table: nn.Embedding, n_rows: int, part: Part, leave: Leave) -> None:
    start, stop, _ = vocabulary_interval(n_rows, part.degree, part.rank)
    if table.padding_idx is not None:
        inside = start <= table.padding_idx < stop
        table.padding_idx = table.padding_idx - start if inside else None
    look_up = table.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        """Rows of the ids that lie here, zeros for the others; then the sum over parts."""
        foreign = (ids < start) | (ids >= stop)
        found = look_up((ids - start).masked_fill(foreign, 0))
        return leave(found.masked_fill(foreign.unsqueeze(-1), 0))

    table.forward = forward  # type: ignore[method-assign, assignment]


def _compute_own_rows(matrix: nn.Linear, cutting: Cutting, part: Part) -> None:
    """Of rows that several parts hold together, compute with those that are this part's."""
    used = cutting.used(part.degree, part.rank)
    if sum(stop - start for start, stop in used) == matrix.out_features:
        return

    def own(held: torch.Tensor) -> torch.Tensor:
        return torch.cat([held[start:stop] for start, stop in used])

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = None if matrix.bias is None else own(matrix.bias)
        return F.linear(x, own(matrix.weight), bias)

    matrix.forward = forward  # type: ignore[method-assign, assignment]
