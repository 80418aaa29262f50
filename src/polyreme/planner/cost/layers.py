"""Seconds and bytes of single layers, by strategy: what solvers of assignments add up.

What a layer exchanges once a step counts for each microbatch by its share, as in UniAP's cost of
gradients. Left out, because it is not a sum over layers: that neighbours hide each other's
exchanges, what is gathered ahead, what only one layer of a stage holds at a time. Plans that
solvers find are therefore priced again, as whole steps.
"""

from __future__ import annotations

import functools
import math
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ...plan.order import ORDERS
from ...plan.order.kind import Order, steady
from ...plan.play import Costs
from ..draft import Draft, Strategy
from ..groups import tied_units
from ..outline import Outline
from ..room import Fitting
from ..solve.instance import Array, Instance
from .activations import waiting_bytes
from .memory import SLACK_SHARE
from .pipeline import StepCost


class LayerCosts:
    """Instances of outlines of one number of tensor parts."""

    def __init__(self, cost: StepCost, fitting: Fitting) -> None:
        self.cost, self.fitting = cost, fitting
        self._memory, self._profile = fitting.memory, fitting.profile
        self._graph = self._memory.graph
        names = [layer.name for layer in self._graph.layers]
        last = self._graph.output.rpartition(".")[0]
        # One layer of each class stands for all; the last one differs by its loss.
        keys = [(self._memory.classes.layer_of[name], name == last) for name in names]
        firsts = dict(zip(reversed(keys), reversed(names), strict=True))
        self._kinds = list(firsts.values())
        self._index = np.array([list(firsts).index(key) for key in keys])
        self.tied = [unit for unit in tied_units(self._graph) if len(unit) > 1]
        self._have = np.array(fitting.have_bytes, dtype=float)
        self._alone = functools.cache(self._alone_s)
        self._crossing = functools.cache(cost.crossing_s)
        self._known: dict[Any, float] = {}

    def instance(self, outline: Outline) -> Instance:
        """The numbers of an outline."""
        space, microbatches = outline.space, outline.microbatches
        order = ORDERS[space.order] if space.order else None
        n_stages, n = len(space.sizes) or 1, len(self._graph.layers)
        draft = self._draft(outline)
        size, pp, rounds = outline.microbatch, space.pp, draft.rounds
        time = np.array(
            [
                [
                    np.inf
                    if not space.allows(name, strategy)
                    else sum(self.cost.visit_s(name, strategy, size, pp, rounds))
                    + self._once(name, strategy, pp, microbatches, size, draft) / microbatches
                    for strategy in outline.strategies
                ]
                for name in self._kinds
            ]
        )[self._index]
        stored, saved = self._bytes(outline)
        memory = np.stack(
            [
                stored[self._index] + held * saved[self._index]
                for held in in_flight(order, pp, n_stages, microbatches)
            ]
        )
        memory[-1, -1] += (1 + SLACK_SHARE) * self._logits_bytes(outline)
        k = len(outline.strategies)
        between = np.zeros((n - 1, k, k))
        if n_stages > 1:
            between += np.array(self._crossing(outline.layout, pp, size))[:, None, None]
        alpha, beta = _weights(outline)
        return Instance(
            time=np.broadcast_to(time, (n_stages, n, k)),
            memory=memory,
            capacity=np.maximum(self._capacity(outline, order), 1.0),
            inside=np.zeros((n - 1, k, k)),
            between=between,
            alpha=alpha,
            beta=beta,
        )

    def least_s(self, outline: Outline) -> float:
        """A time that no assignment goes below: computation alone, shared out evenly."""
        device_s, host_s = self._alone(outline.layout.tp, outline.layout.cp, outline.microbatch)
        return evenly_s(outline, max(float(device_s.sum()), float(host_s.sum())))

    def alone_s(self, outline: Outline) -> Array:
        """Seconds (L) of both passes of each layer over a microbatch, of one device alone."""
        return self._alone(outline.layout.tp, outline.layout.cp, outline.microbatch)[0]

    def _alone_s(self, tp: int, cp: int, size: int) -> tuple[Array, Array]:
        """Seconds (L) of the device, and of its host."""
        once, share = Strategy(tp=tp, cp=cp), self.cost.traffic.parts.share
        asked = [
            self.cost.data.layer_asked(name, once, size, share(name, once)) for name in self._kinds
        ]
        device_s = np.array([each.forward + each.backward for each in asked])
        host_s = np.array([each.host_forward + each.host_backward for each in asked])
        return device_s[self._index], host_s[self._index]

    def _draft(self, outline: Outline) -> Draft:
        """One that stands for the layout, where prices ask for a draft."""
        alike = dict.fromkeys(outline.space.layers, outline.layout)
        return outline.space.draft(alike, outline.microbatches)

    def _once(
        self,
        name: str,
        strategy: Strategy,
        pp: int,
        microbatches: int,
        size: int,
        draft: Draft,
    ) -> float:
        """What a layer's parameters take once a step; the switches of a draft are those of all."""
        key = (name, strategy, pp, microbatches, size)
        if key not in self._known:
            self._known[key] = self.cost.data.layer_s(name, strategy, pp, microbatches, size, draft)
        return self._known[key]

    def _bytes(self, outline: Outline) -> tuple[Array, Array]:
        """Of each class and strategy: stored bytes, and those that wait of one microbatch."""
        stored, saved = [], []
        for name in self._kinds:
            times = self._profile.layers[self._graph.layer(name).kind]
            row, row_saved = [], []
            for strategy in outline.strategies:
                held = self._memory.layer_storage(name, strategy, 0)
                states = held.parameters + held.gradients + held.optimizer
                buffers = self._memory.kept_bytes(name, strategy, outline.microbatches)
                buffers += self._memory.classes.shapes[name].buffer_bytes
                row.append(states + (1 + SLACK_SHARE) * buffers)
                own = waiting_bytes(times, strategy, outline.microbatch)
                if outline.takes_turns:
                    own = max(0, own - held.gradients)
                row_saved.append((1 + SLACK_SHARE) * own)
            stored.append(row)
            saved.append(row_saved)
        return np.array(stored, float), np.array(saved, float)

    def _logits_bytes(self, outline: Outline) -> float:
        """At least of logits, beside saved tensors, or what gradients leave of them."""
        memory, layout = self._memory, outline.layout
        known = memory.loss_bytes(layout)
        if outline.takes_turns:
            known = memory.backward_bytes(layout, self._profile)
        return known * outline.microbatch / layout.cp

    def moments(self, outline: Outline) -> tuple[Array, Array, Array]:
        """Bytes (L, K) of each layer while its gradients are reduced, it is gathered, fetched."""
        memory, strategies = self._memory, outline.strategies
        reducing = [[memory.reducing_bytes(n, k) for k in strategies] for n in self._kinds]
        passing = [[memory.passing_bytes(n, k) for k in strategies] for n in self._kinds]
        fetched = [[memory.fetched(n, k).n_bytes for k in strategies] for n in self._kinds]
        return (
            np.array(reducing, float)[self._index],
            np.array(passing, float)[self._index],
            np.array(fetched, float)[self._index],
        )

    def _capacity(self, outline: Outline, order: Order | None) -> Array:
        """Bytes that each stage has for its layers; ranks with several share theirs out evenly."""
        pp = outline.space.pp
        rows = outline.space.rows or (outline.layout.n_devices,) * pp
        of_rank = [self._have[at:end].min() for at, end in pairwise(accumulate((0, *rows)))]
        placed = order.placements(pp) if order is not None else ((0,),)
        shared = (order.chunks * order.copies) if order is not None else 1
        capacity = np.array(
            [min(of_rank[rank] for rank in ranks) / shared for ranks in placed], dtype=float
        )
        found: Array = capacity - self._profile.context_bytes / shared
        return found


def evenly_s(outline: Outline, total_s: float) -> float:
    """Seconds of a step whose stages share so many seconds a microbatch evenly."""
    alpha, beta = _weights(outline)
    return alpha * total_s + beta * total_s / (len(outline.space.sizes) or 1)


def _weights(outline: Outline) -> tuple[float, float]:
    """What of a step is the sum of all stages, and what the longest of them again and again."""
    if not outline.space.order:
        return 1.0, outline.microbatches - 1.0
    chunks = ORDERS[outline.space.order].chunks
    return 1 / chunks, outline.microbatches * chunks - 1.0


def in_flight(order: Order | None, pp: int, n_stages: int, microbatches: int) -> list[int]:
    """The most microbatches of each stage that are forward and not yet backward."""
    if order is None:
        return [1]
    found = [order.in_flight(stage, pp, microbatches) for stage in range(n_stages)]
    if None not in found:
        return [each for each in found if each is not None]
    return _played_in_flight(order, pp, n_stages, steady(microbatches, pp))


@functools.cache
def _played_in_flight(order: Order, pp: int, n_stages: int, microbatches: int) -> list[int]:
    held: Any = np.zeros(n_stages, int)
    most = np.zeros(n_stages, int)
    for own in order.actions(pp, microbatches, Costs.equal(n_stages)):
        held[:] = 0
        for action in own:
            held[action.stage] += (action.kind == "F") - (action.kind in "BW")
            most = np.maximum(most, held)
    return [max(1, math.ceil(each)) for each in most.tolist()]
