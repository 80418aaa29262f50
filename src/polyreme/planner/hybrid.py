"""All spaces that the user's fixes leave: parts, contexts and pipeline ranks not fixed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import msgspec

from ..cluster.types import Cluster
from ..errors import ConfigError
from ..graph.layer import LayerGraph
from ..plan.degrees import refused_cp, refused_tp
from ..plan.ir import Workload
from ..plan.options import DEFAULT_ORDER, Parallel
from ..plan.order import ANY, ORDERS, families
from .space import ALL_COUNTS_UP_TO, Space, offer


def spaces(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    parallel: Parallel,
    *,
    all_devices: bool = False,
    seconds: Mapping[str, float] | None = None,
) -> Iterator[Space]:
    """One for each number of tensor parts, split tokens or not, of contexts and pipeline ranks.

    The first is that of fewest of them. With `all_devices` those that leave more unused than
    others have to are left out.

    Raises:
        ConfigError: a fix is impossible here, or together they leave nothing.
    """
    found = _offered(graph, cluster, workload, parallel, all_devices, seconds)
    if all_devices:
        known = list(found)
        most = max(_used(space) for space in known)
        found = (space for space in known if _used(space) == most)
    yield from found


def _used(space: Space) -> int:
    """The most devices that a draft of a space takes."""
    return space.pp * max(strategy.n_devices for strategy in space.strategies)


def _offered(
    graph: LayerGraph,
    cluster: Cluster,
    workload: Workload,
    parallel: Parallel,
    all_devices: bool,
    seconds: Mapping[str, float] | None,
) -> Iterator[Space]:
    refused: ConfigError | None = None
    empty = True
    for each in _cuts(graph, cluster, parallel):
        try:
            space = offer(graph, cluster, workload, each, all_devices=all_devices, seconds=seconds)
        except ConfigError as error:
            refused = refused or error
            continue
        empty = False
        yield space
    if empty:
        raise refused or ConfigError(parallel.check())


def _cuts(graph: LayerGraph, cluster: Cluster, parallel: Parallel) -> Iterator[Parallel]:
    n = cluster.n_devices
    tps = [parallel.tp] if parallel.tp else [tp for tp in range(1, n + 1) if _parts(graph, n, tp)]
    for tp in tps:
        for sp, cp in itertools.product(_tokens(tp, parallel), _contexts(graph, n // tp, parallel)):
            most = max(1, min(n // (tp * cp), len(graph.layers)))
            pps = [parallel.pp] if parallel.pp else range(1, most + 1)
            for pp in pps:
                fixed = parallel.pp and parallel.tp
                if n > ALL_COUNTS_UP_TO and not fixed and n % (tp * cp * pp):
                    continue
                for order in _orders(pp, parallel):
                    yield msgspec.structs.replace(parallel, tp=tp, sp=sp, cp=cp, pp=pp, order=order)


def _orders(pp: int, parallel: Parallel) -> tuple[str | None, ...]:
    """As the user says, or one for each way that stages may lie; others are tried later."""
    if parallel.order != ANY:
        return (parallel.order,)
    if pp == 1:
        return (None,)
    usual = ORDERS[DEFAULT_ORDER]
    return tuple(
        order.name
        for family in families()
        for order in (usual if usual in family else family[0],)
        if parallel.stages is None or len(parallel.stages) == pp * order.chunks
    )


def _parts(graph: LayerGraph, n: int, tp: int) -> bool:
    return (n <= ALL_COUNTS_UP_TO or n % tp == 0) and refused_tp(graph, tp) is None


def _contexts(graph: LayerGraph, most: int, parallel: Parallel) -> list[int]:
    """Devices that may share the tokens of a sample: where no plan has to run, any."""
    if parallel.cp or parallel.layouts != "unlike":
        return [parallel.cp or 1]
    return [cp for cp in range(1, most + 1) if refused_cp(graph, cp) is None]


def _tokens(tp: int, parallel: Parallel) -> tuple[bool | None, ...]:
    """Whether tokens are split: as the user says, or both where there are parts."""
    if parallel.sp is not None:
        return (parallel.sp,)
    return (None, True) if tp > 1 else (None,)
