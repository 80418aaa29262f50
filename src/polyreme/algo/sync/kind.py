"""What every sync has: the program that each worker plays, round after round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ...errors import Violation, undefined
from .. import exchange
from ..effects import Compute, Computed, Program, settled

if TYPE_CHECKING:
    import torch

    from ..compose import DataParallel
    from ..feedback.kind import Turn
    from ..worker import Worker

State = dict[str, Any]


class SyncKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sync says when workers compute and when they exchange.

    A round starts from a state and returns the next one: nothing else survives it. Every state has
    ``params`` (the worker's vector) and ``step`` (steps done); from the first round to the last it
    has the same names, with tensors of the same shapes.
    """

    in_step: ClassVar[bool] = True
    """Whether step n is made of batch n of each worker."""
    in_memory: ClassVar[bool] = False
    """Whether players share memory, so that messages take no time and no bytes of a link."""
    adds_up: ClassVar[bool] = False
    """Whether what workers sent is added up over steps, of which the mean is known."""

    finite_sum: ClassVar[bool] = False
    """Whether it sums over all samples of a linear model or one alike, of which it has a `task`."""
    smooth: ClassVar[bool] = False
    """Whether it takes gradients of a linear model's penalty."""
    strongly: ClassVar[bool] = False
    """Whether a linear model's penalty must have an l2."""
    by_feature: ClassVar[bool] = False
    """Whether a linear model's penalty must be one of each feature alone."""
    certifies: ClassVar[bool] = False
    """Whether each round says how far a linear model may be from its optimum."""
    convex: ClassVar[bool] = True
    """Whether a sum over all samples must be a linear model's, which is convex."""

    @property
    def n_vectors(self) -> int:
        """Vectors of the parameters' size that it keeps beside them, the rule's and feedback's."""
        return 0

    def init(self, algorithm: DataParallel, params: torch.Tensor, me: Worker) -> State:
        """State before the first round: parameters, the rule's state and that of exchanges."""
        return {
            "params": params,
            "rule": algorithm.rule.init(params),
            "exchange": exchange.init(algorithm, params, me),
            "step": 0,
        }

    def round(self, algorithm: DataParallel, state: State, me: Worker) -> Program[State]:
        """One round."""
        raise undefined(self, "round")

    def fits(self, n_entries: int) -> None:
        """Raise ConfigError where it is not for so many parameters."""

    @property
    def per_push(self) -> int:
        """Batches that a worker pushes to a server at once."""
        return 1

    def n_servers(self, n: int) -> int:
        """Servers beside n workers: players whose numbers follow those of workers."""
        return 0

    def hear_of(self, worker: int, n: int) -> range:
        """The servers that are told when a worker is gone: all."""
        return range(n, n + self.n_servers(n))

    def machine(self, player: int, n: int) -> int:
        """Whose machine a player is on: between players of one, messages cost nothing."""
        return player

    def whole(self, servers: Sequence[State], workers: Sequence[State] = ()) -> torch.Tensor:
        """The model, from the states of all servers and of all workers, in their order."""
        raise undefined(self, "whole")

    def n_rows(self, n: int) -> int:
        """Vectors that an aggregate is made of, at the least, with n workers: one of each."""
        return n

    def refused(self, n: int) -> list[Violation]:
        """What forbids this sync for so many workers."""
        return []

    def refused_with(self, algorithm: DataParallel) -> list[Violation]:
        """Members of the algorithm that this one does not go with."""
        return []

    def agrees(self, algorithm: DataParallel) -> bool:
        """Whether all workers' `model` is the same between rounds, to the bit."""
        return algorithm.topology.exact

    def lower(self, state: State, me: Worker) -> float:
        """What the whole objective is never below, as far as is known; infinite if nothing is."""
        return -math.inf

    def model(self, state: State) -> torch.Tensor:
        """What this worker gives to the mean that is evaluated and kept."""
        params: torch.Tensor = state["params"]
        return params


def gradient(
    algorithm: DataParallel, params: torch.Tensor, batches: Sequence[int], me: Worker
) -> Program[Computed]:
    """The mean gradient of batches of one's own, held to its share of the local bound.

    Coupled weight decay is in it where a feedback owns the momentum, which is to see it.
    """
    own: Computed = yield Compute(params=params, batch=batches[0])
    for batch in batches[1:]:
        own = both(own, (yield Compute(params=params, batch=batch)))
    decay, _ = _decay(algorithm)
    found = own.gradient.add(params, alpha=decay) if decay else own.gradient
    if algorithm.local_clip_norm is not None:
        found = clipped(found, algorithm.local_clip_norm / math.sqrt(me.n))
    return own if found is own.gradient else replace(own, gradient=found, known_finite=None)


def both(one: Computed, other: Computed) -> Computed:
    """The mean gradient over the labels of two batches."""
    weight = one.weight + other.weight
    share = other.weight / weight if weight else 0.0
    return Computed(
        gradient=one.gradient * (1 - share) + other.gradient * share,
        loss=one.loss * (1 - share) + other.loss * share,
        weight=weight,
        n_samples=one.n_samples + other.n_samples,
    )


def stride(
    algorithm: DataParallel,
    params: torch.Tensor,
    found: torch.Tensor,
    state: State,
    lr: float,
    me: Worker,
) -> Program[tuple[torch.Tensor, State, float]]:
    """The rule's change of parameters, its next state, and the norm before it was clipped."""
    import torch

    _, rule = _decay(algorithm)
    norm = float(torch.linalg.vector_norm(found, dtype=torch.float64))
    if me.clip_norm is not None:
        found = clipped(found, me.clip_norm)
    delta, state = yield from settled(rule.update(found, state, params, lr=lr, layout=me.layout))
    return delta, state, norm


def additive(algorithm: DataParallel) -> DataParallel:
    """With a rule whose changes may be added up, where a server does what ends its steps."""
    rule: Any = algorithm.rule
    if not rule.settles:
        return algorithm
    return msgspec.structs.replace(algorithm, rule=rule.additive)


def moved(
    algorithm: DataParallel,
    params: torch.Tensor,
    found: torch.Tensor,
    state: State,
    lr: float,
    me: Worker,
) -> Program[tuple[torch.Tensor, State, float]]:
    """Parameters after a step of the rule, its next state, and the norm before it was clipped."""
    delta, state, norm = yield from stride(algorithm, params, found, state, lr, me)
    return params + delta, state, norm


def mixed(
    algorithm: DataParallel, params: torch.Tensor, state: State, me: Worker, turn: Turn
) -> Program[tuple[torch.Tensor, State]]:
    """Under gossip the model after its exchange, and the next state of exchanges; else as it is."""
    topology = algorithm.topology
    if topology.exact:
        return params, state
    params, after = yield from topology.mix(params, state["topology"], me, turn, algorithm)
    return params, {**state, "topology": after}


def clipped(vector: torch.Tensor, bound: float) -> torch.Tensor:
    """As torch's clip_grad_norm_ does; what is not finite stays so."""
    import torch

    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    return vector * (bound / (norm + 1e-6)) if norm > bound else vector


def _decay(algorithm: DataParallel) -> tuple[float, Any]:
    """Weight decay that enters before the exchange, and the rule with what is left of it."""
    rule = algorithm.rule
    if not algorithm.feedback.owns_momentum or not rule.coupled_decay:
        return 0.0, rule
    return rule.coupled_decay, undecayed(rule)


def undecayed(rule: Any) -> Any:
    """A rule without the weight decay that is in its gradient by then; others are as they are."""
    return msgspec.structs.replace(rule, weight_decay=0.0) if rule.coupled_decay else rule
