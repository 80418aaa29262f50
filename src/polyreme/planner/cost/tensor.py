"""Tensor parts and contexts: what of a layer's passes they share, and exchange in each of them.

Assumed: the parts of a layer that has cuttings share all of its computation. What they exchange
follows from its regions: each reads the hidden (or all parts' tokens of it) and gives a sum over
parts (or the own tokens of one). A layer that is recomputed repeats what it exchanges before the
last tensor that it saves. Devices that share the tokens of samples gather keys and values of all
of them in each forward and each backward pass, and sum their gradients: the bytes of a ring
(Liu, Zaharia and Abbeel, Ring Attention, 2023). Or they have heads in place of tokens meanwhile,
if each can have some: queries, keys, values and what attention gives go from all to all in either
direction (Jacobs et al., DeepSpeed Ulysses, 2023). They do what sends less; none of it is taken as
hidden, and causal work as dealt out evenly. What experts that are dealt out exchange (`expert`)
comes to that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import msgspec

from ...graph.layer import LayerGraph
from ...graph.tensor import TensorPlan
from ..draft import Strategy
from ..replay import saved_after
from .expert import all_to_all
from .memory import Widths
from .message import Message, Operation

# What a meeting exchanges (forward, backward), with whole tokens and with split ones.
_WHOLE: dict[str, tuple[Operation | None, Operation | None]] = {
    "enter": (None, "all_reduce"),
    "leave": ("all_reduce", None),
    "gather": (None, None),
    "deal": (None, None),
}
_SPLIT: dict[str, tuple[Operation | None, Operation | None]] = {
    "enter": ("all_gather", "reduce_scatter"),
    "leave": ("reduce_scatter", "all_gather"),
    "gather": ("all_gather", None),
    "deal": (None, "all_gather"),
}


class Exchanges(msgspec.Struct, frozen=True, kw_only=True):
    """What a tensor part exchanges in the passes of a microbatch through one layer.

    `again` is what a recomputed layer repeats in its backward pass.
    """

    forward: tuple[Message, ...] = ()
    again: tuple[Message, ...] = ()
    backward: tuple[Message, ...] = ()


class _Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """Where parts meet: how, over how many tokens of how many features, and behind what module."""

    kind: str
    n_tokens: int
    n_features: int
    behind: str | None = None  # None: before something that is saved


class TensorParts:
    """Exchanges of any layer of a model."""

    def __init__(self, graph: LayerGraph, widths: Widths) -> None:
        self._graph, self._widths = graph, widths
        self._saved_after: dict[str, frozenset[str]] = {}
        self.exchanges = functools.cache(self._exchanges)

    def share(self, name: str, strategy: Strategy) -> int:
        """Among how many parts the computation of a layer is divided."""
        plan = self._graph.tensor_plan(name)
        return 1 if plan is None or not plan.cuttings else strategy.tp

    def _exchanges(
        self, name: str, strategy: Strategy, size: int, n_tokens: int | None = None
    ) -> Exchanges:
        """Those of a microbatch of so many samples (of a slice of so many of its tokens)."""
        plan, experts = self._graph.tensor_plan(name), self._graph.expert_plan(name)
        routed = Exchanges()
        if strategy.ep > 1 and experts is not None:
            both = (all_to_all(experts, strategy, size, self._widths.compute, n_tokens),) * 2
            repeated = both if strategy.recompute else ()
            routed = Exchanges(forward=both, again=repeated, backward=both)
        if plan is None:
            return routed
        forward, again, backward = self._contexts(plan, strategy, size)
        meetings = self._meetings(name, plan, sp=strategy.sp) if strategy.tp > 1 else ()
        for meeting in meetings:
            there, back = (_SPLIT if strategy.sp else _WHOLE)[meeting.kind]
            length = meeting.n_tokens if n_tokens is None else n_tokens
            if strategy.sp:
                length = math.ceil(length / strategy.tp) * strategy.tp
            n_bytes = self._bytes(strategy, size * length * meeting.n_features)
            if there is not None:
                forward.append(_over_parts(there, strategy.tp, n_bytes))
                if strategy.recompute and self._repeats(name, meeting):
                    again.append(forward[-1])
            if back is not None:
                backward.append(_over_parts(back, strategy.tp, n_bytes))
        return Exchanges(
            forward=(*forward, *routed.forward),
            again=(*again, *routed.again),
            backward=(*backward, *routed.backward),
        )

    def _contexts(
        self, plan: TensorPlan, strategy: Strategy, size: int
    ) -> tuple[list[Message], list[Message], list[Message]]:
        """What devices that share tokens exchange: forward, again, backward."""
        forward, backward = [], []
        tp, cp = strategy.tp, strategy.cp

        def message(operation: Operation, n_elements: float) -> Message:
            n_bytes = math.ceil(size * n_elements * self._widths.compute)
            return Message(operation=operation, over="contexts", n_ranks=cp, n_bytes=n_bytes)

        for context in plan.contexts if cp > 1 else ():
            keys = context.n_tokens * context.run.local(tp) * context.run.width
            queries = context.n_queries * context.queries.local(tp) * context.queries.width
            ring = [message(operation, 2 * keys) for operation in ("all_gather", "reduce_scatter")]
            # What one has goes to all in equal parts: as much as in a gather of so much in all.
            turned = message("all_gather", 2 * (keys + queries) / cp)
            turns = context.whole_heads(tp * cp)
            if turns and 2 * turned.n_bytes < 3 * ring[0].n_bytes:
                forward.append(turned)
                backward.append(turned)
            else:
                forward.append(ring[0])
                backward += ring
        return forward, list(forward) if strategy.recompute else [], backward

    def _bytes(self, strategy: Strategy, n_elements: int) -> int:
        """Of values between layers, of which a device has those of its tokens."""
        return math.ceil(n_elements * self._widths.compute / strategy.cp)

    def loss(
        self, strategy: Strategy, size: int, n_tokens: int | None = None
    ) -> tuple[Message, ...]:
        """What scoring logits of which each part holds some exchanges: a largest, and two sums."""
        name, _, output = self._graph.output.rpartition(".")
        plan = self._graph.tensor_plan(name)
        if strategy.tp == 1 or plan is None or plan.vocabulary is None:
            return ()
        each = math.prod(self._graph.layer(name).outputs[output].shape[:-1])
        n_labels = size * (each if n_tokens is None else n_tokens)
        n_bytes = math.ceil(n_labels * self._widths.master / strategy.cp)
        return tuple(_over_parts("all_reduce", strategy.tp, k * n_bytes) for k in (1, 2))

    def _meetings(self, name: str, plan: TensorPlan, *, sp: bool) -> Iterator[_Meeting]:
        """In the order of the forward pass, as far as it matters."""
        layer = self._graph.layer(name)
        given = next(iter(layer.outputs.values())).shape
        source, _, output = layer.inputs[0].rpartition(".")
        taken = given if layer.inputs[0].startswith("batch:") else ()
        taken = taken or self._graph.layer(source).outputs[output].shape
        own = taken[0] if plan.n_tokens is None else plan.n_tokens
        if plan.whole in ("in", "both"):
            yield _Meeting(kind="gather", n_tokens=own, n_features=taken[-1])
        if plan.vocabulary is None:
            for cutting in plan.cuttings:
                if cutting.side == "vocabulary":
                    yield _Meeting(
                        kind="leave", n_tokens=own, n_features=given[-1], behind=cutting.path
                    )
        for region in plan.regions:
            lengths = [own if read.n_tokens is None else read.n_tokens for read in region.reads]
            if sp and region.arranged:
                lengths = [own]
            for length in lengths:
                yield _Meeting(kind="enter", n_tokens=length, n_features=taken[-1])
            if region.exit is not None:
                yield _Meeting(
                    kind="leave",
                    n_tokens=lengths[0],
                    n_features=given[-1],
                    behind=region.exit,
                )
        if plan.whole in ("out", "both"):
            yield _Meeting(kind="deal", n_tokens=given[0], n_features=given[-1])

    def _repeats(self, name: str, meeting: _Meeting) -> bool:
        if meeting.behind is None:
            return True
        kind = self._graph.layer(name).kind
        if kind not in self._saved_after:
            self._saved_after[kind] = saved_after(self._graph, name)
        return meeting.behind in self._saved_after[kind]


def _over_parts(operation: Operation, n_ranks: int, n_bytes: int) -> Message:
    return Message(operation=operation, over="parts", n_ranks=n_ranks, n_bytes=n_bytes)
