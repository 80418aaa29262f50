"""Factors of a matrix as a graph of one layer.

Axes: B samples, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import ConfigError, Violation
from ..sample import SampleSpec
from .layer import Layer, LayerGraph
from .linear import LinearLoss
from .parts import Part, assemble

if TYPE_CHECKING:
    from .factor_options import MatrixFactorization

_STD = 0.1  # of factors at first: off the saddle at 0, and small beside what they come to


class Factors(nn.Module):
    """A vector for each user and each item."""

    def __init__(self, n_users: int, n_items: int, rank: int) -> None:
        super().__init__()
        self.users = nn.Parameter(torch.empty(n_users, rank))
        self.items = nn.Parameter(torch.empty(n_items, rank))

    def forward(self, users_B: torch.Tensor, items_B: torch.Tensor) -> torch.Tensor:
        """Predictions [B]."""
        return (self.users[users_B] * self.items[items_B]).sum(-1)


def matrix_factorization(options: MatrixFactorization, sample: SampleSpec) -> LayerGraph:
    """One layer; its flops are 2 for each number of a vector."""
    if "users" not in sample.fields:
        rule, legal = "gives no pairs of users and items", '"ratings"'
        value = ", ".join(sample.fields)
        raise ConfigError([Violation(path="data.kind", value=value, rule=rule, legal=legal)])
    n_users, n_items = sample.numbered["users"], sample.numbered["items"]

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Factors(n_users, n_items, options.rank)

    part = Part(
        name="factors",
        kind="matrix_factorization",
        inputs=("batch:users", "batch:items"),
        outputs=("out",),
        make=on_meta,
        names={"": "factors"},
    )
    graph = assemble("matrix_factorization", [part], sample, _small)
    return graph.scored(LinearLoss("squared", 0.0, False), 2.0 * options.rank)


def _small(module: nn.Module, _layer: Layer, _seed: int) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=_STD)
