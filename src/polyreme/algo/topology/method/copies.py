"""Copies of models that all neighbours keep alike: each worker sends what its own copy lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...effects import Program
from ..graph.kind import ever, shares
from . import said

if TYPE_CHECKING:
    import torch

    from ...compose import DataParallel
    from ...worker import Worker
    from ..graph.kind import GraphKind

State = dict[str, Any]


def init(
    algorithm: DataParallel, params: torch.Tensor, start: torch.Tensor, me: Worker, graph: GraphKind
) -> State:
    """All copies equal `start`.

    Of neighbours the weighted sum is kept where weights stay, else one copy of each that may ever
    be one.
    """
    state: State = {"compress": said.init(algorithm, params, me), "own": start}
    if graph.period(me.n) == 1:
        row = shares(graph, me.n, 0, me.seed)[me.rank]
        state["sum"] = start * float(row.sum() - row[me.rank])
    else:
        takes = ever(graph, me.n)[me.rank].nonzero().flatten().tolist()
        state["others"] = {str(j): start for j in takes if j != me.rank}
    return state


def mean(state: State, me: Worker, graph: GraphKind, step: int) -> torch.Tensor:
    """The weighted mean of one's own copy and those of neighbours."""
    share = shares(graph, me.n, step, me.seed)[me.rank].tolist()
    total: torch.Tensor = state["own"] * share[me.rank]
    if "sum" in state:
        total = total + state["sum"]
    for key, copy in state.get("others", {}).items():
        if share[int(key)]:
            total = total + copy * share[int(key)]
    return total


def tell(
    x: torch.Tensor,
    state: State,
    me: Worker,
    graph: GraphKind,
    step: int,
    algorithm: DataParallel,
    *,
    keep: float = 1.0,
    add: float = 1.0,
) -> Program[State]:
    """Send x compressed; each copy becomes `keep` times itself and `add` times what was sent."""
    message, compress = said.packed(algorithm, x, state["compress"], me, step)
    heard = yield from said.told(message, ever(graph, me.n), me)
    after = {
        **state,
        "compress": compress,
        "own": state["own"] * keep + said.unpacked(message) * add,
    }
    if "sum" in state:
        share = shares(graph, me.n, step, me.seed)[me.rank].tolist()
        total = state["sum"] * keep
        for source, each in heard.items():
            total = total + said.unpacked(each) * (add * share[source])
        after["sum"] = total
    else:
        after["others"] = {
            str(source): state["others"][str(source)] * keep + said.unpacked(each) * add
            for source, each in heard.items()
        }
    return after
