"""What of parameters is gathered and reduced together, by elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ..draft import Strategy
from ..shapes import ParamShape
from .expert import dealt, shared


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """Elements of parameters that are gathered and reduced together.

    `gathered` whole with padding; of the trainable ones `reduced` with padding, `trained` without,
    `largest` is the largest. `loose` counts trainable elements that stay whole on every device.
    One that `looks_up` is not gathered for its backward pass, unless it is recomputed. One of
    `experts` that are dealt out holds those of a device.
    """

    gathered: int
    reduced: int
    trained: int
    largest: int
    loose: int
    parts: int
    looks_up: bool
    experts: bool = False

    def gathered_again(self, strategy: Strategy) -> bool:
        """Whether the backward pass gathers it once more."""
        return strategy.level == "params" and (strategy.recompute or not self.looks_up)


def count_units(
    params: Sequence[ParamShape], strategy: Strategy, *, looks_up: bool
) -> tuple[Unit, ...]:
    """Elements of parameters that run so: one unit, or two where experts are dealt out."""
    if strategy.ep == 1:
        return (count_unit(params, strategy.parts, looks_up=looks_up),)
    own = count_unit(dealt(params, strategy.ep), strategy.of_experts.parts, looks_up=False)
    rest = count_unit(shared(params), strategy.parts, looks_up=looks_up)
    return rest, msgspec.structs.replace(own, experts=True)


def count_unit(params: Iterable[ParamShape], parts: int, *, looks_up: bool) -> Unit:
    """Elements of parameters that are one unit, cut into so many parts."""
    gathered = reduced = trained = largest = loose = 0
    for param in params:
        if param.trainable:
            largest = max(largest, param.n_elements)
        if parts == 1 or param.special:
            loose += param.n_elements * param.trainable
            continue
        padded = param.padded_elements(parts) * parts
        gathered += padded
        if param.trainable:
            reduced += padded
            trained += param.n_elements
    return Unit(
        gathered=gathered,
        reduced=reduced,
        trained=trained,
        largest=largest,
        loose=loose,
        parts=parts,
        looks_up=looks_up,
    )
