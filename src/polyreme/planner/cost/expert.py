"""Experts that are dealt out: what a device holds of a layer, and what its passes exchange.

Of `ep` devices next to each other each holds as many whole experts. A microbatch's tokens go to the
devices that have their experts, and what these give comes back: an exchange from all to all each,
forward, and of the gradients of both backward (Lepikhin et al., "GShard", ICLR 2021, section 3.2).

Assumed: routing is balanced, so that each expert gets as many tokens as any other. Then a device
computes with as many rows as it would of its own tokens with all experts, keeps as much of them for
the backward pass, and sends as much to each device. Neither how far real routers are from that,
nor what fewer and larger products gain, is counted; exchanges hide behind nothing.

Those who hold the same experts are replicas x shards x contexts / ep: they sum these experts'
gradients, and by the level share the states among the shards of them, row by row of all matrices.
What is no expert's is held as if there were none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from ..draft import Strategy
from ..held import Held, HeldParam
from ..shapes import ParamShape
from .message import Message

if TYPE_CHECKING:
    from ...graph.experts import ExpertPlan


def dealt(params: Iterable[ParamShape], ep: int) -> tuple[ParamShape, ...]:
    """What one of `ep` devices holds of experts' parameters: rows (E / ep x rows of one, ...)."""
    return tuple(
        msgspec.structs.replace(
            param, shape=(param.shape[0] // ep * param.shape[1], *param.shape[2:])
        )
        for param in params
        if param.expert
    )


def shared(params: Iterable[ParamShape]) -> tuple[ParamShape, ...]:
    """What is no expert's."""
    return tuple(param for param in params if not param.expert)


def dealt_out(held: Held, how: Mapping[str, Strategy]) -> Iterator[tuple[int, Held]]:
    """What all who share samples or tokens hold whole (1), and what of them each `ep`-th one does.

    `how` has the units, by their first layers, whose experts are dealt out; of these experts, those
    that no shards share.
    """
    found: dict[int, list[HeldParam]] = {1: []}
    for param in held.params:
        strategy = how.get(param.unit)
        if strategy is None or not param.shape.expert:
            found[1].append(param)
        elif strategy.of_experts.parts == 1:
            (own,) = dealt([param.shape], strategy.ep)
            # No unit is cut here: the dense parameters beside it may be.
            here = msgspec.structs.replace(param, shape=own, unit="")
            found.setdefault(strategy.ep, []).append(here)
    for ep, params in found.items():
        yield ep, Held(params=tuple(params), units=())


def all_to_all(
    plan: ExpertPlan, strategy: Strategy, size: int, width: int, n_tokens: int | None = None
) -> Message:
    """What takes a microbatch's tokens to their experts, and what brings the results back.

    Of `size` samples (or a slice of so many of their tokens), elements of `width` bytes.
    """
    tokens = size * (plan.n_tokens if n_tokens is None else n_tokens)
    return Message(
        operation="all_to_all",
        over="experts",
        n_ranks=strategy.ep,
        n_bytes=math.ceil(tokens / strategy.cp * plan.top_k * plan.n_features * width),
        ep=strategy.ep,
    )
