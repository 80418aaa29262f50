"""What would make a plan fit; nothing is offered that was not tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError
from ..graph.layer import LayerGraph
from ..plan.ir import Workload
from ..plan.options import Parallel
from ..units import show_bytes
from .draft import Draft
from .room import Fitting
from .space import Space, offer

MOST_DEVICES = 2**16


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What a search was asked."""

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    parallel: Parallel

    def space(self) -> Space | None:
        """What is offered; None if nothing is."""
        try:
            return offer(self.graph, self.cluster, self.workload, self.parallel)
        except ConfigError:
            return None


def ways_out(problem: Problem, fitting: Fitting) -> tuple[str, ...]:
    """Changes that make some plan fit, each alone where one is enough."""
    ways = [
        *_unfixed(problem, fitting),
        *_smaller_batch(problem, fitting),
        *_more_devices(problem, fitting),
    ]
    least = _least_need(problem, fitting)
    return (*ways, f"devices with at least {show_bytes(least)} of memory")


def _unfixed(problem: Problem, fitting: Fitting) -> Iterator[str]:
    """Parts of the plan that the user fixed: one at a time, then all."""
    fixed = [
        name
        for name in ("microbatch", "recompute", "level", "shard", "replica")
        if getattr(problem.parallel, name) is not None
    ]
    found = False
    for name in fixed:
        draft = _first_fit(_change(problem, {name: None}), fitting)
        if draft is not None:
            found = True
            yield f"parallel.{name} = {_value(draft, name)}"
    if len(fixed) > 1 and not found:
        draft = _first_fit(_change(problem, dict.fromkeys(fixed)), fitting)
        if draft is not None:
            changes = [f"parallel.{name} = {_value(draft, name)}" for name in fixed]
            yield " with ".join(changes)


def _smaller_batch(problem: Problem, fitting: Fitting) -> Iterator[str]:
    workload = problem.workload
    batch = workload.global_batch // 2
    while batch >= 1:
        smaller = msgspec.structs.replace(
            problem, workload=msgspec.structs.replace(workload, global_batch=batch)
        )
        if _first_fit(smaller, fitting) is not None:
            yield f"train.global_batch = {batch}"
            return
        batch //= 2


def _more_devices(problem: Problem, fitting: Fitting) -> Iterator[str]:
    """Twice as many, and so on, each with the drafts that cut most."""
    larger = problem.cluster
    if problem.parallel.shard is not None and problem.parallel.replica is not None:
        return
    while larger.n_devices <= MOST_DEVICES // 2:
        larger = msgspec.structs.replace(larger, hosts=larger.hosts * 2)
        space = msgspec.structs.replace(problem, cluster=larger).space()
        room = _fitting(larger, fitting)
        if space is not None and any(room(draft).fits for draft in _leanest(space)):
            yield f"{larger.n_devices} devices"
            return


def _change(problem: Problem, changes: dict[str, None]) -> Problem:
    parallel = msgspec.structs.replace(problem.parallel, **changes)
    return msgspec.structs.replace(problem, parallel=parallel)


def _first_fit(problem: Problem, fitting: Fitting) -> Draft | None:
    """The simplest draft that fits, if any does."""
    space = problem.space()
    if space is None:
        return None
    room = _fitting(problem.cluster, fitting)
    return next((draft for draft in space.drafts() if room(draft).fits), None)


def _leanest(space: Space) -> Iterator[Draft]:
    """Drafts that cut states into most parts and play the smallest microbatch."""
    offered = [strategy for strategy in space.strategies if space.microbatches(strategy.n_devices)]
    most = max(strategy.parts for strategy in offered)
    for strategy in offered:
        if strategy.parts == most:
            (*_, last) = msgspec.structs.replace(space, strategies=(strategy,)).drafts()
            yield last


def _fitting(cluster: Cluster, fitting: Fitting) -> Fitting:
    return Fitting(fitting.memory, fitting.profile, cluster)


def _least_need(problem: Problem, fitting: Fitting) -> int:
    space = problem.space()
    assert space is not None, "the search had one"
    return min(sum(fitting(draft).need_bytes.values()) for draft in space.drafts())


def _value(draft: Draft, name: str) -> str:
    """What a draft has for a field of the spec, in TOML."""
    strategy = next(iter(draft.strategies.values()))
    read: dict[str, Callable[[], str]] = {
        "microbatch": lambda: str(draft.microbatch),
        "recompute": lambda: '"all"' if strategy.recompute else '"none"',
        "level": lambda: f'"{strategy.level}"',
        "shard": lambda: str(strategy.shard),
        "replica": lambda: str(strategy.replica),
    }
    return read[name]()
