"""Synchronous training: an exchange at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import exchange
from ..effects import Agree, Program, Record
from ..feedback.kind import Turn
from .kind import State, SyncKind, gradient, moved

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
        own = yield from gradient(algorithm, at, step, me)
        (seen,) = yield Agree(batches=(own.numbers,))
        after = {**state, "step": step + 1}
        if seen.skipped:
            yield Record(step=step + 1, seen=seen, lr=turn.lr)
            return after
        found = own.gradient * seen.share(me.rank)
        topology = algorithm.topology
        if topology.exact:
            found, exchanged = yield from exchange.combined(
                algorithm, found, state["exchange"], me, turn
            )
        else:
            found, exchanged = exchange.own(algorithm, found, state["exchange"], turn)
        after["params"], after["rule"], norm = yield from moved(
            algorithm, params, found, state["rule"], turn.lr, me
        )
        yield Record(
            step=step + 1, seen=seen, lr=turn.lr, grad_norm=norm if topology.exact else None
        )
        if not topology.exact:
            after["params"], mixed = yield from topology.mix(
                after["params"], exchanged["topology"], me, turn, algorithm
            )
            exchanged = {**exchanged, "topology": mixed}
        after["exchange"] = exchanged
        return after
