"""What would make a plan fit; nothing is offered that was not tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError
from ..graph.layer import LayerGraph
from ..plan.ir import Workload
from ..plan.options import Parallel
from ..units import apart, show_bytes
from .draft import Draft
from .hybrid import spaces
from .prices import Prices
from .room import Room
from .space import Space

MOST_DEVICES = 2**16


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What a search was asked."""

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    parallel: Parallel

    def spaces(self) -> list[Space]:
        """What is offered; empty if nothing is."""
        try:
            return list(spaces(self.graph, self.cluster, self.workload, self.parallel))
        except ConfigError:
            return []


def ways_out(problem: Problem, prices: Prices) -> tuple[str, ...]:
    """Changes that make some plan fit, each alone where one is enough."""
    ways = [
        *_unfixed(problem, prices),
        *_smaller_batch(problem, prices),
        *_more_devices(problem, prices),
    ]
    if len(ways) < 2:
        ways += _more_of_larger(problem, prices)
    least = _least_need(problem, prices)
    if least is not None:
        ways.append(f"devices with at least {_amount(least, problem)} of memory")
    return tuple(ways)


def _unfixed(problem: Problem, prices: Prices) -> Iterator[str]:
    """Parts of the plan that the user fixed: one at a time, then all."""
    fixed = [name for name in _SHOWN if getattr(problem.parallel, name) is not None]
    found = False
    for name in fixed:
        draft = _first_fit(_change(problem, {name: None}), prices)
        if draft is not None:
            found = True
            yield f"parallel.{name} = {_SHOWN[name](draft)}"
    if len(fixed) > 1 and not found:
        draft = _first_fit(_change(problem, dict.fromkeys(fixed)), prices)
        if draft is not None:
            changes = [f"parallel.{name} = {_SHOWN[name](draft)}" for name in fixed]
            yield " with ".join(changes)


def _smaller_batch(problem: Problem, prices: Prices) -> Iterator[str]:
    workload = problem.workload
    batch = workload.global_batch // 2
    while batch >= 1:
        smaller = msgspec.structs.replace(
            problem, workload=msgspec.structs.replace(workload, global_batch=batch)
        )
        if _first_fit(smaller, prices) is not None:
            yield f"train.global_batch = {batch}"
            return
        batch //= 2


def _more_devices(problem: Problem, prices: Prices) -> Iterator[str]:
    """Twice as many, and so on, each with the drafts that cut most."""
    larger = problem
    if problem.parallel.shard is not None and problem.parallel.replica is not None:
        return
    while larger.cluster.n_devices <= MOST_DEVICES // 2:
        larger = _doubled(larger)
        if _some_fits(larger, prices):
            yield f"{larger.cluster.n_devices} devices"
            return


def _more_of_larger(problem: Problem, prices: Prices) -> Iterator[str]:
    """Twice as many devices, each with less memory than as many as there are would need."""
    twice = _doubled(problem)
    least, now = _least_need(twice, prices), _least_need(problem, prices)
    if least is not None and now is not None and least < now:
        amount = _amount(least, problem)
        yield f"{twice.cluster.n_devices} devices with at least {amount} of memory each"


def _amount(n_bytes: int, problem: Problem) -> str:
    """Bytes in digits that tell them from what the devices have."""
    have = [kind.memory_bytes for kind in problem.cluster.device_types.values()]
    return apart([n_bytes, *have], show_bytes)[0]


def _doubled(problem: Problem) -> Problem:
    hosts = problem.cluster.hosts * 2
    return msgspec.structs.replace(
        problem, cluster=msgspec.structs.replace(problem.cluster, hosts=hosts)
    )


def _change(problem: Problem, changes: dict[str, None]) -> Problem:
    parallel = msgspec.structs.replace(problem.parallel, **changes)
    return msgspec.structs.replace(problem, parallel=parallel)


def _first_fit(problem: Problem, prices: Prices) -> Draft | None:
    """The simplest draft that fits, if any does."""
    if not _some_fits(problem, prices):
        return None
    return next(
        draft
        for space in problem.spaces()
        for draft in space.drafts()
        if _room(draft, problem, prices).fits
    )


def _some_fits(problem: Problem, prices: Prices) -> bool:
    return any(
        _room(draft, problem, prices).fits for space in problem.spaces() for draft in leanest(space)
    )


def leanest(space: Space) -> Iterator[Draft]:
    """Drafts that cut states into most parts and play the smallest microbatch."""
    offered = [strategy for strategy in space.strategies if space.counts(strategy.data)]
    most = max(strategy.parts for strategy in offered)
    for strategy in offered:
        if strategy.parts == most:
            (*_, last) = msgspec.structs.replace(space, strategies=(strategy,)).drafts()
            yield last


def _room(draft: Draft, problem: Problem, prices: Prices) -> Room:
    return prices.fitting(draft.strategy.tp, problem.cluster)(draft)


def _least_need(problem: Problem, prices: Prices) -> int | None:
    """Bytes that would do for each device, of drafts for which hosts have room; if there is one."""
    needs = (
        sum(fitting.tightest(draft).need_bytes.values())
        for space in problem.spaces()
        for draft in leanest(space)
        for fitting in (prices.fitting(draft.strategy.tp, problem.cluster),)
        if all(room.fits for room in fitting.hosts(draft))
    )
    return min(needs, default=None)


# What a draft has for a field of the spec, in TOML.
_SHOWN: Mapping[str, Callable[[Draft], str]] = {
    "microbatch": lambda draft: str(draft.microbatch),
    "recompute": lambda draft: '"all"' if draft.strategy.recompute else '"none"',
    "offload": lambda draft: f'"{draft.strategy.offload}"',
    "level": lambda draft: f'"{draft.strategy.level}"',
    "shard": lambda draft: str(draft.strategy.shard),
    "replica": lambda draft: str(draft.strategy.replica),
    "ep": lambda draft: str(max(each.ep for each in draft.strategies.values())),
    "tp": lambda draft: str(draft.strategy.tp),
    "pp": lambda draft: str(draft.pp),
}
