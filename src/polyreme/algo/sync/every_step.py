"""Synchronous training: an exchange at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import exchange
from ..effects import Agree, Compute, Program, Record, settled
from ..feedback.kind import Turn
from .kind import State, SyncKind

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..worker import Worker


class EveryStep(SyncKind, frozen=True, kw_only=True, tag="EveryStep", tag_field="kind"):
    """All replicas average their gradients at every step (synchronous SGD).

    Under gossip each steps along its own gradient, then models are mixed.
    """

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """Parameters, the rule's state and that of exchanges."""
        return {
            "params": params,
            "rule": algorithm.rule.init(params),
            "exchange": exchange.init(algorithm, params, me),
            "step": 0,
        }

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """A gradient, its exchange, an update; under gossip, an update and the model's exchange."""
        params, step = state["params"], state["step"]
        turn = Turn(step=step, lr=me.lr(step))
        at = algorithm.feedback.at(params, state["exchange"]["feedback"])
        own = yield Compute(params=at, batch=step)
        seen = yield Agree(numbers=own.numbers)
        after = {**state, "step": step + 1}
        yield Record(step=step + 1, seen=seen, lr=turn.lr)
        if seen.skipped:
            return after
        gradient = own.gradient * seen.share(me.rank)
        topology = algorithm.topology
        if topology.exact:
            gradient, exchanged = yield from exchange.combined(
                algorithm, gradient, state["exchange"], me, turn
            )
        else:
            gradient, exchanged = exchange.own(algorithm, gradient, state["exchange"], turn)
        delta, after["rule"] = yield from settled(
            algorithm.rule.update(gradient, state["rule"], params, lr=turn.lr, layout=me.layout)
        )
        after["params"] = params + delta
        if not topology.exact:
            after["params"], mixed = yield from topology.mix(
                after["params"], exchanged["topology"], me, turn, algorithm
            )
            exchanged = {**exchanged, "topology": mixed}
        after["exchange"] = exchanged
        return after
