"""Aggregators as plain functions of (n, d) tensors: ``pr.aggregate.mean(rows)``.

One row a worker. Each function gives one vector of d entries, of the rows' type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from .algo.aggregate import Aggregator
from .algo.aggregate.kind import AggregatorKind
from .algo.aggregate.majority import MajorityVote
from .algo.aggregate.mean import Mean
from .algo.effects import alone, settled
from .algo.legal import checked, no_member
from .errors import ConfigError, Violation, absent

if TYPE_CHECKING:
    import torch

_NAMES = ("combined", "majority_vote", "mean")


def __getattr__(name: str) -> object:
    raise absent(__name__, name, _NAMES)


def mean(rows: torch.Tensor) -> torch.Tensor:
    """The mean of all rows, summed in their order.

    >>> import torch
    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).tolist()
    [2.0, 4.0]
    """
    return combined(Mean(), rows)


def majority_vote(rows: torch.Tensor) -> torch.Tensor:
    """The sign that most rows have, entry by entry; 0 where as many are for plus as for minus.

    >>> import torch
    >>> majority_vote(torch.tensor([[1.0, 2.0], [3.0, -6.0], [0.5, 0.0]])).tolist()
    [1.0, 0.0]
    """
    return combined(MajorityVote(), rows)


def combined(aggregator: AggregatorKind, rows: torch.Tensor) -> torch.Tensor:
    """What any aggregator, one's own too, makes of rows when it has seen none before.

    NaN and infinity count as any number: what becomes of them is the aggregator's. Rows stay as
    they are.

    Raises:
        ConfigError: Rows are not (n, d) with n of at least 1, or the aggregator is not legal.
    """
    import torch

    if not isinstance(aggregator, AggregatorKind):
        raise no_member("aggregator", aggregator, get_args(Aggregator))
    checked(aggregator, type(aggregator).__name__)
    tensor = isinstance(rows, torch.Tensor)
    shape = tuple(rows.shape) if tensor else ()
    if len(shape) != 2 or not shape[0] or not rows.is_floating_point():
        value = f"{rows.dtype} of shape {shape}" if tensor else type(rows).__name__
        rule = "is not rows of real numbers"
        legal = "a tensor of shape (n, d), n >= 1, of floating point"
        raise ConfigError([Violation(path="rows", value=value, rule=rule, legal=legal)])
    found = aggregator.combine(list(rows.detach()), aggregator.init(rows[0].detach()))
    return alone(settled(found))[0]
