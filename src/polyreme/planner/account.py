"""The account of a plan: its estimate with what a reader needs to follow it, and its rivals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from ..plan.ir import Capacity, Costs, Estimate, LayerCost, Point
from .cost.activations import waiting_bytes
from .cost.data import StepTime
from .cost.layers import LayerCosts
from .cost.message import Message
from .draft import Draft, Strategy, describe_strategy
from .prices import Prices, Pricing
from .room import Fitting


def estimate(draft: Draft, time: StepTime, prices: Prices) -> Estimate:
    """What a draft is predicted to take, by device, stage and layer."""
    layers = layer_costs(draft, prices)
    pricing = prices.pricing(draft)
    fitting = pricing.fitting
    return Estimate(
        step_s=time.step_s,
        compute_s=time.compute_s,
        comm_s=time.comm_s,
        exposed_comm_s=time.exposed_comm_s,
        memory=fitting.by_device(draft),
        update_s=time.update_s,
        n_unused=fitting.cluster.n_devices - draft.n_devices,
        stages=_stages(draft, pricing, layers),
        capacity=capacity(draft, fitting),
        layers=layers,
    )


def layer_costs(draft: Draft, prices: Prices) -> tuple[LayerCost, ...]:
    """A row for layers of one class and strategy, in the order of first members.

    The layer that scores the loss, and the last one, which is not gathered again, stand alone;
    layers to which values are moved from another layout stand apart from those that have them.
    """
    graph = prices.graph
    special = {graph.output.rpartition(".")[0], graph.layers[-1].name}
    rows: dict[tuple[int, Strategy, str, float], list[str]] = {}
    for name, strategy in draft.strategies.items():
        classes = prices.of(strategy.tp).fitting.memory.classes
        moved_s = 0.0
        if not draft.is_alike:
            moved_s = draft.microbatches * sum(prices.unlike.cost.brought_s(draft, name))
        alone = name if name in special else ""
        rows.setdefault((classes.layer_of[name], strategy, alone, moved_s), []).append(name)
    return tuple(
        _layer_cost(tuple(names), strategy, draft, prices.of(strategy.tp), moved_s)
        for (_, strategy, _, moved_s), names in rows.items()
    )


def _layer_cost(
    names: tuple[str, ...], strategy: Strategy, draft: Draft, costs: LayerCosts, moved_s: float
) -> LayerCost:
    cost, fitting = costs.cost, costs.fitting
    name, parts, pp = names[0], cost.traffic.parts, draft.pp
    once = msgspec.structs.replace(strategy, recompute=False)
    share = parts.share(name, strategy)
    forward_s = backward_s = again_s = parts_s = 0.0
    sizes = _sizes(draft, strategy)
    for size, count in sizes.items():
        there_s, back_s = cost.data.layer_passes(name, once, size, share)
        forward_s += count * there_s
        backward_s += count * back_s
        both_s = sum(cost.data.layer_passes(name, strategy, size, share))
        again_s += count * (both_s - there_s - back_s)
        found = parts.exchanges(name, strategy, size)
        messages: list[Message] = [*found.forward, *found.again, *found.backward]
        if name == fitting.memory.graph.output.rpartition(".")[0]:
            messages += parts.loss(strategy, size)
        parts_s += count * sum(cost.data.price_s(strategy, pp, each) for each in messages)
    hosted_s = sum(cost.data.hosted_s(name, strategy, draft.rounds))
    over_data = cost.data.layer_once(name, strategy, pp, max(sizes), draft)
    held = fitting.memory.layer_storage(name, strategy, 0)
    kind = fitting.memory.graph.layer(name).kind
    times = fitting.profile.layers[kind]
    return LayerCost(
        layers=names,
        how=describe_strategy(strategy),
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=again_s,
        parts_s=parts_s,
        data_s=over_data.exposed_comm_s,
        update_s=over_data.update_s,
        stored_bytes=held.parameters + held.gradients + held.optimizer,
        saved_bytes=waiting_bytes(times, strategy, max(sizes)),
        moved_s=moved_s,
        hosted_s=draft.rounds * hosted_s,
    )


def _sizes(draft: Draft, strategy: Strategy) -> dict[int, int]:
    """Sizes of microbatches as the step is priced with: as they are, or all as the largest."""
    if not _is_even(draft):
        return dict(draft.microbatch_sizes)
    return {draft.microbatch_of(strategy): draft.microbatches}


def _is_even(draft: Draft) -> bool:
    """Whether all microbatches are priced as the largest."""
    first = draft.strategy
    in_stages = bool(draft.stages) or first.tp * first.cp > 1
    return in_stages or draft.deals_out or draft.fetches or not draft.is_alike


def _stages(draft: Draft, pricing: Pricing, layers: Sequence[LayerCost]) -> Costs:
    """What each stage's passes over a microbatch take; of one stage, in the mean."""
    if _is_even(draft):
        return pricing.cost.costs(draft)
    n = draft.microbatches
    there_s = sum(len(each.layers) * each.forward_s for each in layers) / n
    back_s = sum(len(each.layers) * (each.backward_s + each.recompute_s) for each in layers) / n
    return Costs(forward=(there_s,), inputs=(back_s / 2,), weights=(back_s / 2,))


def capacity(draft: Draft, fitting: Fitting) -> tuple[Capacity, ...]:
    """What the draft's devices have, neighbours of one type together."""
    found: list[Capacity] = []
    left = draft.n_devices
    for name, hosts in groupby(fitting.cluster.hosts, key=lambda host: host.device_type):
        n = min(left, sum(host.n_devices for host in hosts))
        left -= n
        if n:
            n_bytes = fitting.cluster.device_types[name].memory_bytes
            found.append(Capacity(n_devices=n, device_type=name, n_bytes=n_bytes))
    return tuple(found)


def front(points: Iterable[Point]) -> tuple[Point, ...]:
    """Those that no other equals in time and memory and betters in one of them, fastest first.

    Of points that are equal in both the first is kept.
    """
    found: list[Point] = []
    for each in sorted(points, key=lambda point: (point.step_s, point.peak_bytes)):
        if not found or each.peak_bytes < found[-1].peak_bytes:
            found.append(each)
    return tuple(found)
