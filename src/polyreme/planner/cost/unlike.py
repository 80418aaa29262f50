"""Drafts whose layers are laid out unlike each other: time, and memory by cause.

A layer's own passes, exchanges and bytes are those that it has where all layers are laid out as it
is. Between two layouts a microbatch's values move: where both hold the same share of it, each
device gathers from those among whom the shares change places, forward and backward; where the one
that reads holds more, it gathers forward, and its gradient is only cut; where it holds less, the
other way round. What a layer exchanges once a step hides behind its own passes alone. Sums over
holders of one parameter are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from ...graph.layer import LayerGraph
from ...plan.order import ORDERS
from ...plan.play import Costs, play
from ...profile.record import Profile
from ..draft import Draft, Strategy
from .data import StepTime
from .layers import LayerCosts
from .memory import SLACK_SHARE, Storage
from .message import Message


class UnlikeCost:
    """Seconds and bytes of any draft; `costs_of` gives those of a number of tensor parts."""

    def __init__(
        self, graph: LayerGraph, profile: Profile, costs_of: Callable[[int], LayerCosts]
    ) -> None:
        self._graph, self._profile, self._of = graph, profile, costs_of
        self._names = [layer.name for layer in graph.layers]
        self._moved = functools.cache(self._moved_s)

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step: stages are played, each with what stands between its layers."""
        stages = draft.stages or (tuple(draft.strategies),)
        passes = [self._stage_s(draft, names) for names in stages]
        once = [[self._once_s(draft, name) for name in names] for names in stages]
        costs = Costs(
            forward=tuple(there for there, _ in passes),
            inputs=tuple(back / 2 for _, back in passes),
            weights=tuple(back / 2 for _, back in passes),
            send=max(map(functools.partial(self._sent_s, draft), stages[:-1]), default=0.0),
        )
        if draft.stages:
            actions = draft.actions or ORDERS[draft.order].actions(
                draft.pp, draft.microbatches, costs
            )
            makespan_s = play(actions, len(stages), costs).makespan_s
        else:
            makespan_s = draft.microbatches * sum(passes[0])
        exposed_s = max(map(sum, once))
        return StepTime(compute_s=makespan_s, comm_s=exposed_s, exposed_comm_s=exposed_s)

    def causes(self, draft: Draft, pipe: int) -> dict[str, int]:
        """Peak bytes by cause of the fullest device of a pipeline rank, in a backward pass."""
        held = Storage()
        kept = 0.0
        most: dict[str, list[float]] = {"again": [0.0], "passing": [0.0], "reducing": [0.0]}
        buffers = logits = 0.0
        for stage, names in enumerate(draft.stages or (tuple(draft.strategies),)):
            if pipe not in draft.holders[stage]:
                continue
            flying = 1
            if draft.stages:
                order = ORDERS[draft.order]
                found = order.in_flight(stage, draft.pp, draft.microbatches)
                assert found is not None, "the order says how many are under way"
                flying = found
            for name in names:
                strategy = draft.strategies[name]
                memory, size = self._of(strategy.tp).fitting.memory, self.size(draft, strategy)
                held += memory.layer_storage(name, strategy, 0)
                times = self._profile.layers[self._graph.layer(name).kind]
                parts = strategy.tp if strategy.sp else 1
                whole = times.saved_bytes_per_sample * size / parts
                if strategy.recompute:
                    kept += flying * times.recompute_bytes_per_sample * size / parts
                    most["again"].append(whole)
                else:
                    kept += flying * whole
                shapes = memory.classes.layers[memory.classes.layer_of[name]].shapes
                buffers += shapes.buffer_bytes
                buffers += memory.kept_bytes(name, strategy, draft.microbatches)
                most["passing"].append(memory.passing_bytes(name, strategy))
                most["reducing"].append(memory.reducing_bytes(name, strategy))
                if name == self._graph.output.rpartition(".")[0]:
                    logits = memory.loss_bytes(strategy) * size
        passing = sorted(most["passing"])[-2:]
        buffers += sum(passing) + passing[-1] + max(most["reducing"])
        found_bytes = {
            "parameters": held.parameters,
            "gradients": held.gradients,
            "optimizer": held.optimizer,
            "activations": math.ceil(kept + max(most["again"])),
            "logits": math.ceil(logits),
            "buffers": math.ceil(buffers),
            "context": self._profile.context_bytes,
        }
        anew = sum(found_bytes[cause] for cause in ("activations", "logits", "buffers"))
        return {**found_bytes, "slack": math.ceil(SLACK_SHARE * anew)}

    @staticmethod
    def size(draft: Draft, strategy: Strategy) -> int:
        """Samples of the largest microbatch of a layer that runs so."""
        samples = math.ceil(draft.global_batch / strategy.data)
        return math.ceil(samples / draft.microbatches)

    def _stage_s(self, draft: Draft, names: Sequence[str]) -> tuple[float, float]:
        """Forward and backward seconds of a stage's layers and of what stands before each."""
        forward_s = backward_s = 0.0
        for name in names:
            strategy = draft.strategies[name]
            cost, size = self._of(strategy.tp).cost, self.size(draft, strategy)
            there_s, back_s = cost.passes_s(name, strategy, size, draft.pp)
            forward_s, backward_s = forward_s + there_s, backward_s + back_s
            at = self._names.index(name)
            if at:
                before = draft.strategies[self._names[at - 1]]
                microbatch = size * strategy.data
                there_s, back_s = self._moved(before, strategy, at - 1, microbatch, draft.pp)
                forward_s, backward_s = forward_s + there_s, backward_s + back_s
        return forward_s, backward_s

    def _moved_s(
        self, before: Strategy, after: Strategy, cut: int, microbatch: int, pp: int
    ) -> tuple[float, float]:
        """Forward and backward seconds of bringing values across a cut from layout to layout."""
        had, wanted = _holds(before), _holds(after)
        if (before.data, had) == (after.data, wanted):
            return 0.0, 0.0
        wider = before if before.tp > after.tp else after
        cost = self._of(1).cost
        values = cost.traffic.crossing(cut, Strategy(), microbatch)
        n_bytes = sum(message.n_bytes for message in values)

        def gathered_s(whole: float, own: float) -> float:
            n_ranks = round(whole / own)
            message = Message(
                operation="all_gather",
                over="parts",
                n_ranks=n_ranks,
                n_bytes=math.ceil(n_bytes * whole),
            )
            return self._of(wider.tp).cost.data.price_s(wider, pp, message)

        if had == wanted:
            among = max(before.data, after.data) // min(before.data, after.data)
            each = gathered_s(among * had, had)
            return each, each
        if had < wanted:
            return gathered_s(wanted, had), 0.0
        return 0.0, gathered_s(had, wanted)

    def _once_s(self, draft: Draft, name: str) -> float:
        strategy = draft.strategies[name]
        data, size = self._of(strategy.tp).cost.data, self.size(draft, strategy)
        return data.layer_s(name, strategy, draft.pp, draft.microbatches, size, draft)

    def _sent_s(self, draft: Draft, names: Sequence[str]) -> float:
        """What the last of these layers hands on to the next stage."""
        strategy = draft.strategies[names[-1]]
        crossing = self._of(strategy.tp).cost.crossing_s(
            strategy, draft.pp, self.size(draft, strategy)
        )
        return crossing[self._names.index(names[-1])]


def _holds(strategy: Strategy) -> float:
    """The share of a microbatch's values that each device has between layers."""
    return 1 / (strategy.data * (strategy.tp if strategy.sp else 1))
