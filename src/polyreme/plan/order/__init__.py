"""Orders of a pipeline's actions, one generator a file; a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError, Violation, nearest_first
from .by_list import ZBV, Chimera, DualPipe, ZBAuto
from .dualpipe_v import DualPipeV
from .gems import Gems
from .gpipe import GPipe
from .interleaved import Interleaved
from .kind import Order
from .one_f_one_b import OneFOneB
from .pipedream import PipeDream
from .searched import Searched
from .terapipe import TeraPipe
from .v_shape import VHalf, VMin
from .zero_bubble import ZBH1, ZBH2

ORDERS: Mapping[str, Order] = {
    order.name: order
    for order in (
        GPipe(),
        OneFOneB(),
        Interleaved(),
        ZBH1(),
        ZBH2(),
        ZBAuto(),
        Searched(),
        ZBV(),
        VHalf(),
        VMin(),
        Gems(),
        Chimera(),
        DualPipe(),
        DualPipeV(),
        TeraPipe(),
        PipeDream(),
    )
}


ANY = "any"  # in place of a name: the planner chooses


def families() -> tuple[tuple[Order, ...], ...]:
    """Orders that a planner may choose from, together where their stages lie alike.

    Left out: those that train otherwise than one device, cut samples, or take seconds to make.
    """
    found: dict[object, list[Order]] = {}
    for order in ORDERS.values():
        if order.synchronous and order.slices == 1 and order.name != Searched.name:
            found.setdefault((order.copies, order.placements(4)), []).append(order)
    return tuple(map(tuple, found.values()))


def find(name: str, path: str = "parallel.order") -> Order:
    """The order of that name; `path` is where it was asked for.

    Raises:
        ConfigError: there is none; lists those that there are.
    """
    if name in ORDERS:
        return ORDERS[name]
    legal = ", ".join(nearest_first(name, list(ORDERS)))
    raise ConfigError([Violation(path=path, value=name, rule="is no order", legal=legal)])
