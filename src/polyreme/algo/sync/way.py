"""Local steps of a worker, and how the ways that workers went so become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import exchange
from ..effects import Numbers, Program, Seen, settled
from ..vector import all_finite
from .kind import State, gradient, mixed, moved

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..feedback.kind import Turn
    from ..rule import Rule
    from ..worker import Worker


def stepped(
    algorithm: DataParallel,
    params: torch.Tensor,
    rule: State,
    exchanged: State,
    batch: int,
    lr: float,
    me: Worker,
) -> Program[tuple[torch.Tensor, State, Numbers]]:
    """Parameters and the rule's state after a step of one's own, and what others must know of it.

    There is none where the gradient is not finite, whose labels do not count, or has no labels.
    """
    at = algorithm.feedback.at(params, exchanged["feedback"])
    own = yield from gradient(algorithm, at, (batch,), me)
    if not own.is_finite:
        return params, rule, own.numbers._replace(weight=0.0)
    if own.weight:
        params, rule, _ = yield from moved(algorithm, params, own.gradient, rule, lr, me)
    return params, rule, own.numbers


def arrival(gone: torch.Tensor) -> Numbers:
    """What others must know of a way: whether it is finite."""
    return Numbers(finite=float(all_finite(gone)))


def marked(seen: Seen, arrived: Seen) -> Seen:
    """A step as the log has it: skipped, if the round was thrown away or nobody took it."""
    bad = arrived.bad
    if not bad or arrived.apart:
        return replace(seen, apart=True)
    rows = enumerate(seen.rows)
    return Seen(rows=tuple(row._replace(finite=0.0) if rank in bad else row for rank, row in rows))


def took_part(seens: Sequence[Seen], arrived: Seen) -> tuple[float, ...]:
    """1 for each worker that took a step of the round and whose way is finite, else 0."""
    columns = zip(*(seen.rows for seen in seens), strict=True)
    took = [any(row.finite and row.weight for row in rows) for rows in columns]
    return tuple(
        float(each and bool(row.finite)) for each, row in zip(took, arrived.rows, strict=True)
    )


def lost(arrived: Seen) -> bool:
    """Whether the round is thrown away, since ways are not finite that it cannot go without."""
    return bool(arrived.bad) and not arrived.apart


def together(
    algorithm: DataParallel,
    outer: Rule,
    start: torch.Tensor,
    gone: torch.Tensor,
    state: State,
    me: Worker,
    turn: Turn,
    weights: Sequence[float],
    *,
    total: float | None = None,
    expected: int | None = None,
) -> Program[tuple[torch.Tensor, State, State]]:
    """The model once all went the mean of their ways, the outer rule's state and exchanges'."""
    mean, exchanged = yield from exchange.given(
        algorithm,
        gone,
        state["exchange"],
        me,
        turn,
        weights=weights,
        total=total,
        expected=expected,
    )
    delta, after = yield from settled(
        outer.update(mean, state["outer"], start, lr=outer.lr, layout=me.layout)
    )
    params, exchanged = yield from mixed(algorithm, start + delta, exchanged, me, turn)
    return params, after, exchanged
