"""Saved tensors of a device: what waits for backward passes, and what recomputation adds."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from ...graph.layer import LayerGraph
from ...plan.order import ORDERS
from ...plan.order.kind import Ranks, steady
from ...plan.play import Costs
from ...profile.record import KeptBytes, LayerTimes, Profile
from ..draft import Draft, Strategy
from ..groups import Classes, Groups, tied_units


class Layered(NamedTuple):
    """Bytes of a layer: saved, of its gradients, and beside them while it runs."""

    saved: int
    gradient: int
    beside: int


class Activations:
    """Those of one model's layers; `classes` as `Memory` has them."""

    def __init__(self, graph: LayerGraph, classes: Classes) -> None:
        self._graph, self._classes = graph, classes

    def __call__(self, draft: Draft, profile: Profile, pipe: int = 0) -> tuple[int, int]:
        """Bytes of saved tensors on a pipeline rank: in the loss, and at most in passes of layers.

        The latter are more where layers are recomputed, or by what passes are known to hold.
        """
        again = 0
        if profile_knows_passing(profile) or any(
            draft.strategies[name].recompute for name in draft.layers_of(pipe)
        ):
            again = self._again_bytes(draft, profile, pipe)
        if draft.stages:
            kept = self._in_flight_bytes(draft, profile, pipe)
        else:
            kept = self._waiting(self._classes.groups(draft), profile, draft.microbatch)
        return kept, kept + again

    def in_turn(
        self, draft: Draft, profile: Profile, gradients: Mapping[str, int]
    ) -> tuple[int, int]:
        """See the function; `gradients` are bytes of each layer's."""
        rows = {}
        for name, strategy in draft.strategies.items():
            times = profile.layers[self._graph.layer(name).kind]
            rows[name] = Layered(
                saved=waiting_bytes(times, strategy, draft.microbatch),
                gradient=gradients[name],
                beside=beside_bytes(times, strategy, draft.microbatch),
            )
        return in_turn(self._graph, rows, draft.most_bucket_bytes)

    def _in_flight_bytes(self, draft: Draft, profile: Profile, pipe: int) -> int:
        """Saved bytes at the fullest moment of a pipeline rank's order."""
        saved = {
            stage: self._waiting(self._classes.groups(draft, names), profile, draft.microbatch)
            for stage, (names, pipes) in enumerate(zip(draft.stages, draft.holders, strict=True))
            if pipe in pipes
        }
        held = most = 0
        actions = draft.actions or _equal_stages(draft.order, draft.pp, draft.microbatches)
        n_slices = 1 + max(action.token_slice for action in actions[pipe])
        for action in actions[pipe]:
            each = saved[action.stage] // n_slices
            if action.kind == "F":
                held += each
            elif action.kind in "BW":
                held -= each
            most = max(most, held)
        return most

    def _waiting(self, groups: Groups, profile: Profile, size: int) -> int:
        """What all layers keep of a microbatch for their backward passes."""
        kept = 0
        for index, strategy, count in groups.layers:
            times = profile.layers[self._classes.layers[index].kind]
            kept += waiting_bytes(times, strategy, size) * count
        return kept

    def _again_bytes(self, draft: Draft, profile: Profile, pipe: int) -> int:
        """What is alive beyond that while a layer runs, at the layer where it is most.

        By then, layers after it in its stage have freed what they kept, or not kept it yet.
        """
        stages = draft.stages or (tuple(draft.strategies),)
        held = [names for names, pipes in zip(stages, draft.holders, strict=True) if pipe in pipes]
        most, size = 0, draft.microbatch
        for names in held:
            alive = beyond = 0
            for name in names:
                times = profile.layers[self._graph.layer(name).kind]
                strategy = draft.strategies[name]
                alive += waiting_bytes(times, strategy, size)
                beyond = max(beyond, alive + beside_bytes(times, strategy, size))
            most = max(most, beyond - alive)
        return most


def in_turn(graph: LayerGraph, rows: Mapping[str, Layered], bucket_bytes: int) -> tuple[int, int]:
    """Saved bytes in the loss, and at most in the backward pass, beyond those of all gradients.

    Of a step of one backward pass over all layers: gradients of a layer come when its saved tensors
    go, so in the loss there are none, and then the more of both of each layer. Those of tied
    weights come with the last layer that has them, and others of a bucket with its first.
    """
    place = {name: at for at, name in enumerate(rows)}
    coming = Counter[str]()
    for unit in tied_units(graph):
        coming[max(unit, key=place.__getitem__)] += sum(rows[name].gradient for name in unit)
    gradients = left = coming.total()
    kept = turn = most = 0
    for name, row in rows.items():
        kept += row.saved
        turn += max(row.saved, row.gradient)
        there = min(gradients, left + bucket_bytes)
        most = max(most, kept + row.beside + there)
        left -= coming[name]
    return kept - gradients, max(turn, most) - gradients


def activation_bytes(times: LayerTimes, strategy: Strategy, microbatch: int) -> KeptBytes:
    """What a device keeps of a microbatch (samples) of a layer for its backward pass."""
    return times.kept_bytes(microbatch, tp=strategy.tp, sp=strategy.sp, cp=strategy.cp)


def beside_bytes(times: LayerTimes, strategy: Strategy, microbatch: int) -> int:
    """What a layer takes beside what waits while it runs: all it saves, if it is recomputed."""
    passing = times.passing(microbatch, tp=strategy.tp, cp=strategy.cp)
    if not strategy.recompute:
        return passing
    return passing + activation_bytes(times, strategy, microbatch).again


def fixed_bytes(times: LayerTimes) -> int:
    """What of that is the same for any microbatch, while the gradients of a layer come."""
    return 0 if times.passing_bytes is None else times.passing_bytes.fixed


def profile_knows_passing(profile: Profile) -> bool:
    """Whether it says what passes hold for a moment."""
    return any(times.passing_bytes is not None for times in profile.layers.values())


def waiting_bytes(times: LayerTimes, strategy: Strategy, microbatch: int) -> int:
    """What of that waits for the backward pass: all, or the inputs of a recomputed layer."""
    kept = activation_bytes(times, strategy, microbatch)
    return kept.recompute if strategy.recompute else kept.saved


@functools.lru_cache(maxsize=64)
def _equal_stages(order: str, pp: int, microbatches: int) -> Ranks:
    """What an order plays where all stages are alike."""
    found = ORDERS[order]
    if found.in_flight(0, pp, microbatches) is None:  # not more of many than of some
        microbatches = steady(microbatches, pp)
    return found.actions(pp, microbatches, Costs.equal(len(found.placements(pp))))
