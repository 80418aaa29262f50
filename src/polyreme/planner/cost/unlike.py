"""Drafts whose layers are laid out unlike each other: time, and memory by cause.

A layer's own passes, exchanges and bytes are those that it has where all layers are laid out as it
is. Between two layouts a microbatch's values move (`moves`): forward each device gets what it lacks
of what the layer that reads takes, backward what it lacks of the gradients of what it made. What a
layer exchanges once a step hides behind its own passes alone. Sums over holders of one parameter
are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import msgspec

from ...graph.layer import LayerGraph
from ...plan.order import ORDERS
from ...plan.play import Costs, play
from ...profile.fit import Fit
from ...profile.record import Profile
from ..draft import Draft, Strategy
from .activations import Layered, beside_bytes, fixed_bytes, in_turn, waiting_bytes
from .data import RankTime, StepTime
from .exchange import usual
from .layers import LayerCosts, in_flight
from .memory import SLACK_SHARE, Memory, Storage
from .moves import lack


class UnlikeCost:
    """Seconds and bytes of any draft; `costs_of` gives those of a number of tensor parts."""

    def __init__(
        self, graph: LayerGraph, profile: Profile, costs_of: Callable[[int], LayerCosts]
    ) -> None:
        self._graph, self._profile, self._of = graph, profile, costs_of
        self._names = [layer.name for layer in graph.layers]
        self._fit, host_of = Fit(profile), costs_of(1).cost.data.host_of
        self._lack = functools.cache(functools.partial(lack, host_of=host_of))
        self._lacked = functools.cache(self._lacked_s)
        self._crossing_bytes = functools.cache(self._crossed_bytes)

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step: stages are played, each with what stands between its layers."""
        draft = self.ordered(draft)
        costs = self.costs(draft)
        if draft.stages:
            makespan_s = play(draft.actions, len(draft.stages), costs).makespan_s
        else:
            each_s = costs.forward[0] + costs.inputs[0] + costs.weights[0]
            makespan_s = draft.microbatches * each_s
        return self._step(draft, makespan_s)

    def sketched(self, draft: Draft) -> StepTime:
        """The same by the closed form of the order, where it has one."""
        order = ORDERS.get(draft.order)
        closed_s = order and order.closed_form_s(draft.pp, draft.microbatches, self.costs(draft))
        return self._step(draft, closed_s) if closed_s else self(draft)

    def ordered(self, draft: Draft) -> Draft:
        """The draft with the actions of its order, and exchanges as they usually are."""
        draft = usual(draft)
        if not draft.stages or draft.actions:
            return draft
        order = ORDERS[draft.order]
        actions = order.actions(draft.pp, draft.microbatches, self.costs(draft))
        return msgspec.structs.replace(draft, actions=actions)

    @staticmethod
    def sliced(draft: Draft) -> Draft:
        """The draft as it is: slices of tokens, if its order has any, are even."""
        return draft

    def costs(self, draft: Draft) -> Costs:
        """Of each stage's passes over one microbatch, with what moves between its layers."""
        stages = draft.stages or (tuple(draft.strategies),)
        passes = [self._stage_s(draft, names) for names in stages]
        return Costs(
            forward=tuple(there for there, _, _ in passes),
            inputs=tuple(back - later for _, back, later in passes),
            weights=tuple(later for _, _, later in passes),
            send=max(map(functools.partial(self._sent_s, draft), stages[:-1]), default=0.0),
        )

    def _step(self, draft: Draft, makespan_s: float) -> StepTime:
        stages = draft.stages or (tuple(draft.strategies),)
        once = [[self._once(draft, name) for name in names] for names in stages]
        exposed_s = max(sum(each.exposed_comm_s for each in own) for own in once)
        update_s = max(sum(each.update_s for each in own) for own in once)
        parts_s = [0.0] * draft.pp  # of each pipeline rank, inside its passes
        for names, pipes in zip(stages, draft.holders, strict=True):
            each_s = sum(self._beside_s(draft, name) for name in names)
            for pipe in pipes:
                parts_s[pipe] += each_s * draft.microbatches / len(pipes)
        inside_s = min(max(parts_s), makespan_s)
        return StepTime(
            compute_s=makespan_s - inside_s + update_s,
            comm_s=exposed_s + inside_s,
            exposed_comm_s=exposed_s + inside_s,
            update_s=update_s,
        )

    def causes(self, draft: Draft, pipe: int) -> dict[str, int]:
        """Peak bytes by cause of the fullest device of a pipeline rank, in a backward pass."""
        held = Storage()
        kept = 0.0
        most: dict[str, list[float]] = {"passing": [0.0], "reducing": [0.0], "fetched": [0.0]}
        buffers = logits = again = 0.0
        rows: dict[str, Layered] = {}
        stages = draft.stages or (tuple(draft.strategies),)
        order = ORDERS.get(draft.order)
        flying = in_flight(order, draft.pp, len(stages), draft.microbatches)
        for names, pipes, n_flying in zip(stages, draft.holders, flying, strict=True):
            alive = beyond = 0.0  # layers after the one that is recomputed have freed theirs
            for name in names if pipe in pipes else ():
                strategy = draft.strategies[name]
                memory = self.memory(strategy)
                size = draft.microbatch_of(strategy)
                stored = memory.layer_storage(name, strategy, 0)
                held += stored
                times = self._profile.layers[self._graph.layer(name).kind]
                own = waiting_bytes(times, strategy, size)
                kept += n_flying * own
                alive += own
                beside = beside_bytes(times, strategy, size)
                beyond = max(beyond, alive + beside)
                rows[name] = Layered(saved=own, gradient=stored.gradients, beside=beside)
                shapes = memory.classes.layers[memory.classes.layer_of[name]].shapes
                buffers += shapes.buffer_bytes
                buffers += memory.kept_bytes(name, strategy, draft.microbatches)
                most["passing"].append(memory.passing_bytes(name, strategy))
                reducing = memory.reducing_bytes(name, strategy)
                most["reducing"].append(max(reducing, fixed_bytes(times)))
                most["fetched"].append(memory.fetched(name, strategy).n_bytes)
                if name == self._graph.output.rpartition(".")[0]:
                    logits = memory.loss_bytes(strategy) * size / strategy.cp
            again = max(again, beyond - alive)
        if draft.takes_turns:
            kept, again = 0.0, in_turn(self._graph, rows, draft.most_bucket_bytes)[1]
        passing = sorted(most["passing"])[-2:]
        buffers += sum(passing) + passing[-1] + max(most["reducing"]) + max(most["fetched"])
        found_bytes = {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": math.ceil(kept + again),
            "logits": math.ceil(logits),
            "buffers": math.ceil(buffers),
            "context": self._profile.context_bytes,
        }
        anew = sum(found_bytes[cause] for cause in ("activations", "logits", "buffers"))
        return {**found_bytes, "slack": math.ceil(SLACK_SHARE * anew)}

    def memory(self, strategy: Strategy) -> Memory:
        """Of layers of so many tensor parts."""
        return self._of(strategy.tp).fitting.memory

    def _stage_s(self, draft: Draft, names: Sequence[str]) -> tuple[float, float, float]:
        """Forward and backward seconds of a stage's layers and of what stands before each.

        And what of the latter can wait: half of the layers' own, where these have halves.
        """
        forward_s = backward_s = later_s = 0.0
        for name in names:
            strategy = draft.strategies[name]
            cost, size = self._of(strategy.tp).cost, draft.microbatch_of(strategy)
            there_s, back_s = cost.visit_s(name, strategy, size, draft.pp, draft.rounds)
            forward_s, backward_s = forward_s + there_s, backward_s + back_s
            later_s += back_s / 2 if strategy.halves else 0.0
            there_s, back_s = self.brought_s(draft, name)
            forward_s, backward_s = forward_s + there_s, backward_s + back_s
        return forward_s, backward_s, later_s

    def _beside_s(self, draft: Draft, name: str) -> float:
        """Seconds a microbatch of what a layer's passes exchange, and of what moves before it.

        What it fetches from its host's memory and sends there is among it.
        """
        strategy = draft.strategies[name]
        cost, size = self._of(strategy.tp).cost, draft.microbatch_of(strategy)
        share = cost.traffic.parts.share(name, strategy)
        alone_s = sum(cost.data.layer_passes(name, strategy, size, share))
        passes_s = sum(cost.visit_s(name, strategy, size, draft.pp, draft.rounds))
        return passes_s - alone_s + sum(self.brought_s(draft, name))

    def brought_s(self, draft: Draft, name: str) -> tuple[float, float]:
        """Forward and backward seconds a microbatch of what moves between a layer and the last."""
        at = self._names.index(name)
        if not at:
            return 0.0, 0.0
        before, strategy = draft.strategies[self._names[at - 1]], draft.strategies[name]
        microbatch = draft.microbatch_of(strategy) * strategy.data
        return self.moved_s(before, strategy, at - 1, microbatch, draft.pp)

    def moved_s(
        self, before: Strategy, after: Strategy, cut: int, microbatch: int, pp: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of bringing values across a cut from layout to layout.

        `microbatch` is that of all devices of a stage together, in samples.
        """
        n_bytes, had, has = self._crossing_bytes(cut, microbatch), _places(before), _places(after)
        return self._lacked(had, has, n_bytes, pp), self._lacked(has, had, n_bytes, pp)

    def _lacked_s(self, had: Strategy, wanted: Strategy, n_bytes: int, pp: int) -> float:
        """Seconds to get what lacks, as a gather in which each device gets as many bytes."""
        lacking = self._lack(had, wanted, pp)
        if lacking is None:
            return 0.0
        return self._fit.collective_s(
            "all_gather", lacking.n_ranks, lacking.gathered_bytes(n_bytes), lacking.n_hosts
        )

    def _crossed_bytes(self, cut: int, microbatch: int) -> int:
        """Of all that is made before a cut and read after it."""
        crossing = self._of(1).cost.traffic.crossing(cut, Strategy(), microbatch)
        return sum(message.n_bytes for message in crossing)

    def _once(self, draft: Draft, name: str) -> RankTime:
        strategy = draft.strategies[name]
        data, size = self._of(strategy.tp).cost.data, draft.microbatch_of(strategy)
        return data.layer_once(name, strategy, draft.pp, size, draft)

    def _sent_s(self, draft: Draft, names: Sequence[str]) -> float:
        """What the last of these layers hands on to the next stage."""
        strategy = draft.strategies[names[-1]]
        crossing = self._of(strategy.tp).cost.crossing_s(
            strategy, draft.pp, draft.microbatch_of(strategy)
        )
        return crossing[self._names.index(names[-1])]


def _places(strategy: Strategy) -> Strategy:
    """A layout as far as it says where values are: shards have them as replicas do."""
    return Strategy(replica=strategy.data, cp=strategy.cp, tp=strategy.tp, sp=strategy.sp)
