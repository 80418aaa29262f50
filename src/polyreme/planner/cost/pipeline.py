"""Stages: the order of their passes played on a clock, with what goes from stage to stage.

Passes of a stage take what its layers take of the largest microbatch, divided by the tensor parts,
and these parts' exchanges. A backward pass counts half for inputs and half for weights. A message
takes what an all-gather of its bytes over two devices takes. What of the data axes' exchanges is
not hidden, and the update, count for the stage that has most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ...graph.layer import LayerGraph
from ...plan.order import ORDERS
from ...plan.order.kind import Ranks
from ...plan.play import Costs, play
from ...profile.fit import Fit
from ...profile.record import Profile
from ..draft import Draft
from .data import DataCost, StepTime
from .exchange import tuned
from .tensor import TensorCost


class StepCost:
    """Seconds of a step of any draft: over data axes alone, or with tensor parts and stages."""

    def __init__(self, data: DataCost, graph: LayerGraph, profile: Profile) -> None:
        self._data, self._graph = data, graph
        self._fit = Fit(profile)
        self._tensor = TensorCost(graph, self._fit)

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step on the data rank that has most samples."""
        if not draft.bucket_bytes or draft.decouple is None:
            return self(self._tuned(draft))
        if draft.pp == 1 and draft.strategy.tp == 1:
            return self._data(draft)
        stages = draft.stages or (tuple(draft.strategies),)
        costs = self.costs(draft)
        times = [self._data.stage(draft, names) for names in stages]
        parts_s = [self._parts_s(draft, names) for names in stages]
        if draft.stages:
            makespan_s = play(self._actions(draft, costs), len(stages), costs).makespan_s
        else:
            makespan_s = draft.microbatches * (costs.forward[0] + costs.inputs[0] * 2)
        exposed_s = max(each.exposed_comm_s for each in times)
        per_rank = [
            sum(part for part, pipes in zip(parts_s, draft.holders, strict=True) if pipe in pipes)
            for pipe in range(draft.pp)
        ]
        parts_comm_s = 2 * draft.microbatches * max(per_rank)
        sends_s = 2 * draft.microbatches * costs.send * (len(stages) > 1)
        return StepTime(
            compute_s=makespan_s - min(parts_comm_s, makespan_s) + max(t.update_s for t in times),
            comm_s=max(each.comm_s for each in times) + parts_comm_s + sends_s,
            exposed_comm_s=exposed_s + min(parts_comm_s, makespan_s),
        )

    def costs(self, draft: Draft) -> Costs:
        """Of each stage's passes over one microbatch."""
        stages = draft.stages or (tuple(draft.strategies),)
        forward, backward = [], []
        for names in stages:
            comm_s = self._parts_s(draft, names)
            forward_s = backward_s = 0.0
            for name in names:
                time = self._data.stage(draft, (name,))
                share = self._tensor(name, draft, self._width).share
                forward_s += time.forward_s / share
                backward_s += time.backward_s / share
            forward.append(forward_s + comm_s)
            backward.append((backward_s + comm_s) / 2)
        return Costs(
            forward=tuple(forward),
            inputs=tuple(backward),
            weights=tuple(backward),
            send=self._send_s(draft) if draft.stages else 0.0,
            slices=_slices(draft),
        )

    @staticmethod
    def _actions(draft: Draft, costs: Costs) -> Ranks:
        """Of the draft, or of its order for stages as they are."""
        if draft.actions:
            return draft.actions
        return ORDERS[draft.order].actions(draft.pp, draft.microbatches, costs)

    def ordered(self, draft: Draft) -> Draft:
        """The draft with the actions of its order, for stages as they are, and its exchanges."""
        draft = self._tuned(draft)
        if not draft.stages:
            return draft
        return msgspec.structs.replace(draft, actions=self._actions(draft, self.costs(draft)))

    def _tuned(self, draft: Draft) -> Draft:
        workload = self._data.memory.workload
        synchronous = draft.order not in ORDERS or ORDERS[draft.order].synchronous
        return tuned(draft, self, parts=workload.by_entry and synchronous)

    @property
    def _width(self) -> int:
        return self._data.memory.widths.compute

    def _parts_s(self, draft: Draft, names: Sequence[str]) -> float:
        return sum(self._tensor(name, draft, self._width).comm_s for name in names)

    def _send_s(self, draft: Draft) -> float:
        """The longest message between stages."""
        ends = [names[-1] for names in draft.stages[:-1]]
        elements = max(
            sum(math.prod(spec.shape) for spec in self._graph.layer(name).outputs.values())
            for name in ends
        )
        share = draft.strategy.tp if draft.strategy.sp else 1
        n_bytes = elements * draft.microbatch * self._width // share
        return self._fit.collective_s("all_gather", 2, 2 * n_bytes, 1)


def _slices(draft: Draft) -> tuple[float, ...]:
    """The share of a pass that each slice of tokens takes; none where passes are whole.

    It is that of the tokens: what attention to earlier ones adds to later slices is not measured.
    """
    if draft.actions:
        n = 1 + max(action.token_slice for own in draft.actions for action in own)
    else:
        n = ORDERS[draft.order].slices if draft.order in ORDERS else 1
    if n > 1 and len(draft.token_slices) == n:
        return tuple(tokens / sum(draft.token_slices) for tokens in draft.token_slices)
    return (1 / n,) * n if n > 1 else ()
