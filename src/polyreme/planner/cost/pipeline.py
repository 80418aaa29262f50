"""Stages: the order of their passes played on a clock, with what goes from stage to stage.

Passes of a stage take what its layers take of the largest microbatch, or of a tensor part's share
of it, or of its tokens where devices share them, and what these exchange. A backward pass counts
half for inputs and half for weights, but where a layer is gathered or run again for it: there all
of it is for inputs.
What of the data axes' exchanges is not hidden, sums over holders of the same parameters, and the
update, count for the pipeline rank that has most.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import msgspec

from ...plan.grid import Cell
from ...plan.order import ORDERS
from ...plan.order.kind import Ranks
from ...plan.play import Costs, play
from ...profile.fit import Asked, Fit
from ..draft import Draft, Strategy
from .data import DataCost, StepTime
from .exchange import tuned, usual
from .message import Message, Messages, Over
from .slices import SliceCost, even_slices

LONG = 4_000  # microbatches of all stages: beyond, playing takes seconds


def is_long(draft: Draft) -> bool:
    """Whether a step is not played without need."""
    return len(draft.stages) * draft.microbatches > LONG


class StepCost:
    """Seconds of a step of any draft: over data axes alone, or with tensor parts and stages."""

    def __init__(self, data: DataCost) -> None:
        self.data, self.traffic = data, data.traffic
        self._played: tuple[Ranks, Costs, float] | None = None
        self._beside: tuple[tuple[object, object], dict[int, dict[str, float]]] | None = None
        self.passes_s = functools.cache(self._passes_s)
        self._slices = SliceCost(data.memory.graph, Fit(data.profile))

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step on the data rank that has most samples."""
        if not draft.bucket_bytes or draft.decouple is None or self._uncut(draft):
            return self(self.ordered(draft))
        if draft.pp == draft.strategy.tp == draft.strategy.cp == 1 and not (
            draft.deals_out or draft.fetches
        ):
            return self.data(draft)
        costs = self.costs(draft)
        if draft.stages:
            draft = msgspec.structs.replace(draft, actions=self._actions(draft, costs))
            makespan_s = self._makespan_s(draft.actions, len(draft.stages), costs)
        else:
            each_s = costs.forward[0] + costs.inputs[0] + costs.weights[0]
            makespan_s = draft.microbatches * each_s
        ranks = [self.data.rank(draft, pipe) for pipe in range(draft.pp)]
        exchanged = [self._exchanged_s(draft, pipe) for pipe in range(draft.pp)]
        hosted = [0.0] * draft.pp
        if draft.fetches:
            hosted = [self._hosted_s(draft, pipe) for pipe in range(draft.pp)]
        in_passes = ("parts", "contexts", "experts")
        parts_s = max(
            hosted_s + sum(each[over] for over in in_passes)
            for each, hosted_s in zip(exchanged, hosted, strict=True)
        )
        parts_s = min(parts_s, makespan_s)
        exposed_s = max(
            rank.exposed_comm_s + each["holders"]
            for rank, each in zip(ranks, exchanged, strict=True)
        )
        update_s = max(rank.update_s for rank in ranks)
        return StepTime(
            compute_s=makespan_s - parts_s + update_s,
            comm_s=max(
                hosted_s + sum(each.values())
                for each, hosted_s in zip(exchanged, hosted, strict=True)
            ),
            exposed_comm_s=exposed_s + parts_s,
            update_s=update_s,
        )

    def sketched(self, draft: Draft) -> StepTime:
        """The same by the closed form of the order, which is not played; holders' sums left out.

        Played where the order has no closed form, or there are no stages.
        """
        order = ORDERS.get(draft.order)
        costs = self.costs(draft)
        closed_s = order and order.closed_form_s(draft.pp, draft.microbatches, costs)
        if not closed_s:
            return self(draft)
        ranks = [self.data.rank(draft, pipe) for pipe in range(draft.pp)]
        exposed_s = max(rank.exposed_comm_s for rank in ranks)
        update_s = max(rank.update_s for rank in ranks)
        return StepTime(
            compute_s=closed_s + update_s,
            comm_s=exposed_s,
            exposed_comm_s=exposed_s,
            update_s=update_s,
        )

    def costs(self, draft: Draft) -> Costs:
        """Of each stage's passes over one microbatch."""
        stages, size = draft.stages or (tuple(draft.strategies),), draft.microbatch
        rounds = draft.rounds
        passes = [
            [
                (*self.visit_s(name, strategy, size, draft.pp, rounds), strategy.halves)
                for name in names
                for strategy in (draft.strategies[name],)
            ]
            for names in stages
        ]
        spare = [self._spare_s(draft, names) for names in stages]
        whole = [
            sum(back for _, back, _ in each) - less
            for each, (_, less) in zip(passes, spare, strict=True)
        ]
        weights = [sum(back / 2 for _, back, halves in each if halves) for each in passes]
        return Costs(
            forward=tuple(
                sum(there for there, _, _ in each) - less
                for each, (less, _) in zip(passes, spare, strict=True)
            ),
            inputs=tuple(both - later for both, later in zip(whole, weights, strict=True)),
            weights=tuple(weights),
            send=self._send_s(draft) if draft.stages else 0.0,
            slices=self._shares(draft),
        )

    def _spare_s(self, draft: Draft, names: Sequence[str]) -> tuple[float, float]:
        """What layers of a stage take less than each by itself.

        The host has asked for some of the next ones when the device is through with a long one.
        """
        whole, forward_s, backward_s = Asked(0.0, 0.0), 0.0, 0.0
        for name in names:
            strategy = draft.strategies[name]
            share = self.traffic.parts.share(name, strategy)
            asked = self.data.layer_asked(name, strategy, draft.microbatch, share)
            whole = whole.plus(asked)
            there_s, back_s = asked.lasting
            forward_s, backward_s = forward_s + there_s, backward_s + back_s
        there_s, back_s = whole.lasting
        return forward_s - there_s, backward_s - back_s

    def visit_s(
        self, name: str, strategy: Strategy, size: int, pp: int, rounds: int
    ) -> tuple[float, float]:
        """Forward and backward seconds, with what comes from the host's memory and goes back."""
        passes = self.passes_s(name, strategy, size, pp)
        if not strategy.fetches:
            return passes
        there_s, back_s = self.data.hosted_s(name, strategy, rounds)
        return passes[0] + there_s, passes[1] + back_s

    def _hosted_s(self, draft: Draft, pipe: int) -> float:
        """Seconds a step that layers of a pipeline rank wait for their hosts' memory."""
        each_s = (
            sum(self.data.hosted_s(name, draft.strategies[name], draft.rounds))
            for name in draft.layers_of(pipe)
        )
        return draft.rounds * sum(each_s)

    def _passes_s(self, name: str, strategy: Strategy, size: int, pp: int) -> tuple[float, float]:
        """Forward and backward seconds of a layer's microbatch on one tensor part.

        With what the parts exchange, and of the model's last layer what its loss does.
        """
        share = self.traffic.parts.share(name, strategy)
        there_s, back_s = self.data.layer_passes(name, strategy, size, share)
        found = self.traffic.parts.exchanges(name, strategy, size)
        forward = found.forward
        if name == self.traffic.memory.graph.output.rpartition(".")[0]:
            forward += self.traffic.parts.loss(strategy, size)
        return (
            there_s + self._exchange_s(strategy, pp, forward),
            back_s + self._exchange_s(strategy, pp, (*found.again, *found.backward)),
        )

    def crossing_s(self, strategy: Strategy, pp: int, size: int) -> tuple[float, ...]:
        """What goes on from the first layers, for a cut behind each layer but the last."""
        return tuple(
            self._exchange_s(strategy, pp, self.traffic.crossing(cut, strategy, size))
            for cut in range(len(self.traffic.memory.graph.layers) - 1)
        )

    def _exchange_s(self, layout: Strategy, pp: int, messages: Iterable[Message]) -> float:
        return sum(self.data.price_s(layout, pp, message) for message in messages)

    def _makespan_s(self, actions: Ranks, n_stages: int, costs: Costs) -> float:
        """Played once for the same actions object: how gradients are exchanged changes nothing."""
        if self._played is None or self._played[0] is not actions or self._played[1] != costs:
            self._played = actions, costs, play(actions, n_stages, costs).makespan_s
        return self._played[2]

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
        draft = self.sliced(draft)
        workload = self.data.memory.workload
        synchronous = draft.order not in ORDERS or ORDERS[draft.order].synchronous
        if draft.stages:
            actions = self._actions(draft, self.costs(draft))
            draft = msgspec.structs.replace(draft, actions=actions)
        if not any(self._bucketed(usual(draft), pipe) for pipe in range(draft.pp)):
            return usual(draft)
        cost = self.sketched if is_long(draft) else self
        return tuned(draft, cost, parts=workload.by_entry and synchronous)

    def sliced(self, draft: Draft) -> Draft:
        """The draft with the tokens of each slice, where the cost model says how many."""
        if not self._uncut(draft):
            return draft
        return msgspec.structs.replace(draft, token_slices=self._slices.best(draft))

    def _uncut(self, draft: Draft) -> bool:
        """Whether the cost model says how many tokens each slice has."""
        given = draft.actions or draft.token_slices or not draft.stages
        return not given and ORDERS[draft.order].slices > 1 and self.data.memory.graph.sliced

    def _shares(self, draft: Draft) -> tuple[float, ...]:
        """Of a pass, what each slice of tokens takes; none where passes are whole."""
        if draft.order in ORDERS and ORDERS[draft.order].slices == 1:
            return ()
        if draft.actions:
            n = 1 + max(action.token_slice for own in draft.actions for action in own)
        else:
            n = ORDERS[draft.order].slices if draft.order in ORDERS else 1
            n = len(draft.token_slices) or n
        if n == 1:
            return ()
        tokens = self.data.memory.graph.inputs.get("input_ids")
        if tokens is None:
            return (1 / n,) * n
        lengths = draft.token_slices or even_slices(tokens.shape[0], n)
        return self._slices.shares(draft, lengths)

    def _exchanged_s(self, draft: Draft, pipe: int) -> Mapping[str, float]:
        """Seconds of all that the first device of a pipeline rank exchanges, by over whom.

        How gradients that are whole are exchanged changes the buckets alone: the rest is kept.
        What all devices tell each other at the end of a step is left out.
        """
        key = draft.strategies, draft.actions
        if self._beside is None or any(
            a is not b for a, b in zip(self._beside[0], key, strict=True)
        ):
            self._beside = key, {}
        known = self._beside[1]
        if pipe not in known:
            known[pipe] = self._priced(draft, self.traffic.beside_buckets(draft, Cell(pipe=pipe)))
        bucketed = self._priced(draft, Counter(self._bucketed(draft, pipe)))
        return {over: seconds + bucketed[over] for over, seconds in known[pipe].items()}

    def _bucketed(self, draft: Draft, pipe: int) -> tuple[Message, ...]:
        return self.traffic.buckets(draft, draft.layers_of(pipe))

    def _priced(self, draft: Draft, messages: Messages) -> dict[str, float]:
        """Seconds of messages by over whom, but for what all tell each other."""
        found = dict.fromkeys(get_args(Over), 0.0)
        for message, count in messages.items():
            if message.over != "all":
                found[message.over] += count * self.data.price_s(draft.strategy, draft.pp, message)
        return found

    def _send_s(self, draft: Draft) -> float:
        """The longest of what a stage hands on."""
        sent = (
            self.traffic.handed_on(draft, stage, draft.microbatch)
            for stage in range(len(draft.stages) - 1)
        )
        return max(self._exchange_s(draft.strategy, draft.pp, each) for each in sent)
