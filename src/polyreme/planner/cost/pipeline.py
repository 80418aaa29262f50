"""Stages: the order of their passes played on a clock, with what goes from stage to stage.

Passes of a stage take what its layers take of the largest microbatch, divided by the tensor parts,
and these parts' exchanges. A backward pass counts half for inputs and half for weights. What of the
data axes' exchanges is not hidden, sums over holders of the same parameters, and the update, count
for the pipeline rank that has most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ...plan.grid import Cell
from ...plan.order import ORDERS
from ...plan.order.kind import Ranks
from ...plan.play import Costs, play
from ...profile.fit import Fit
from ..draft import Draft
from .data import DataCost, StepTime
from .exchange import tuned
from .message import Message
from .slices import SliceCost, even_slices


class StepCost:
    """Seconds of a step of any draft: over data axes alone, or with tensor parts and stages."""

    def __init__(self, data: DataCost) -> None:
        self._data, self.traffic = data, data.traffic
        self._slices = SliceCost(data.memory.graph, Fit(data.profile))

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step on the data rank that has most samples."""
        if not draft.bucket_bytes or draft.decouple is None or self._uncut(draft):
            return self(self.ordered(draft))
        if draft.pp == 1 and draft.strategy.tp == 1:
            return self._data(draft)
        costs = self.costs(draft)
        if draft.stages:
            draft = msgspec.structs.replace(draft, actions=self._actions(draft, costs))
            makespan_s = play(draft.actions, len(draft.stages), costs).makespan_s
        else:
            makespan_s = draft.microbatches * (costs.forward[0] + costs.inputs[0] * 2)
        ranks = [self._data.rank(draft, pipe) for pipe in range(draft.pp)]
        exchanged = [self._exchanged_s(draft, pipe) for pipe in range(draft.pp)]
        parts_s = min(max(each["parts"] for each in exchanged), makespan_s)
        exposed_s = max(
            rank.exposed_comm_s + each["holders"]
            for rank, each in zip(ranks, exchanged, strict=True)
        )
        return StepTime(
            compute_s=makespan_s - parts_s + max(rank.update_s for rank in ranks),
            comm_s=max(sum(each.values()) for each in exchanged),
            exposed_comm_s=exposed_s + parts_s,
        )

    def costs(self, draft: Draft) -> Costs:
        """Of each stage's passes over one microbatch."""
        stages = draft.stages or (tuple(draft.strategies),)
        size, last = draft.microbatch, len(stages) - 1
        forward, backward = [], []
        for stage, names in enumerate(stages):
            forward_s = backward_s = 0.0
            for name in names:
                strategy = draft.strategies[name]
                share = self.traffic.parts.share(name, strategy)
                there_s, back_s = self._data.passes(draft, (name,))
                found = self.traffic.parts.exchanges(name, strategy, size)
                forward_s += there_s / share + self._price_s(draft, found.forward)
                backward_s += back_s / share
                backward_s += self._price_s(draft, (*found.again, *found.backward))
            if stage == last:
                forward_s += self._price_s(draft, self.traffic.parts.loss(draft.strategy, size))
            forward.append(forward_s)
            backward.append(backward_s / 2)
        return Costs(
            forward=tuple(forward),
            inputs=tuple(backward),
            weights=tuple(backward),
            send=self._send_s(draft) if draft.stages else 0.0,
            slices=self._shares(draft),
        )

    @staticmethod
    def _actions(draft: Draft, costs: Costs) -> Ranks:
        """Of the draft, or of its order for stages as they are."""
        if draft.actions:
            return draft.actions
        order = ORDERS[draft.order]
        if draft.token_slices:
            order = order.cut(len(draft.token_slices))
        return order.actions(draft.pp, draft.microbatches, costs)

    def ordered(self, draft: Draft) -> Draft:
        """The draft with the actions of its order, for stages as they are, and its exchanges."""
        if self._uncut(draft):
            draft = msgspec.structs.replace(draft, token_slices=self._slices.best(draft))
        workload = self._data.memory.workload
        synchronous = draft.order not in ORDERS or ORDERS[draft.order].synchronous
        if draft.stages:
            actions = self._actions(draft, self.costs(draft))
            draft = msgspec.structs.replace(draft, actions=actions)
        return tuned(draft, self, parts=workload.by_entry and synchronous)

    def _uncut(self, draft: Draft) -> bool:
        """Whether the cost model says how many tokens each slice has."""
        given = draft.actions or draft.token_slices or not draft.stages
        return not given and ORDERS[draft.order].slices > 1 and self._data.memory.graph.sliced

    def _shares(self, draft: Draft) -> tuple[float, ...]:
        """Of a pass, what each slice of tokens takes; none where passes are whole."""
        if draft.actions:
            n = 1 + max(action.token_slice for own in draft.actions for action in own)
        else:
            n = ORDERS[draft.order].slices if draft.order in ORDERS else 1
            n = len(draft.token_slices) or n
        if n == 1:
            return ()
        tokens = self._data.memory.graph.inputs.get("input_ids")
        if tokens is None:
            return (1 / n,) * n
        lengths = draft.token_slices or even_slices(tokens.shape[0], n)
        return self._slices.shares(draft, lengths)

    def _price_s(self, draft: Draft, messages: Iterable[Message]) -> float:
        return sum(self._data.price_s(draft, message) for message in messages)

    def _exchanged_s(self, draft: Draft, pipe: int) -> Mapping[str, float]:
        """Seconds of all that the first device of a pipeline rank exchanges, by over whom.

        What all devices tell each other at the end of a step is left out.
        """
        found = dict.fromkeys(("data", "shards", "replicas", "parts", "holders", "stages"), 0.0)
        for message, count in self.traffic(draft, Cell(pipe=pipe)).items():
            if message.over != "all":
                found[message.over] += count * self._data.price_s(draft, message)
        return found

    def _send_s(self, draft: Draft) -> float:
        """The longest of what a stage hands on."""
        return max(
            self._price_s(draft, self.traffic.handed_on(draft, stage, draft.microbatch))
            for stage in range(len(draft.stages) - 1)
        )
