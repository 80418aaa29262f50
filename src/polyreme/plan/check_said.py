"""What a plan says of itself beside what it does, and beside what the spec says."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..cluster.types import Cluster
from ..errors import Violation, literal, nearest_first
from .grid import Grid, grid_of
from .ir import Plan, Workload
from .order import ORDERS
from .order.kind import Ranks, plan_order
from .play import Costs

_OF_THE_SPEC = ("global_batch", "seq_len", "precision")


def workload_violations(plan: Plan, workload: Workload) -> Iterator[Violation]:
    """Fields that the spec says otherwise: a run goes by the spec."""
    for field in _OF_THE_SPEC:
        found, wanted = getattr(plan, field), getattr(workload, field)
        if found != wanted:
            yield _wrong(field, found, f"is {literal(wanted)} in the spec", literal(wanted))


def name_violations(plan: Plan) -> Iterator[Violation]:
    """An order's name that is none, or another than that of what the devices play.

    Orders that are made for given costs are taken at their word.
    """
    name = plan.order_name
    if not name:
        return
    if name not in ORDERS:
        legal = ", ".join(map(literal, nearest_first(name, list(ORDERS))))
        yield _wrong("order_name", name, "is no order", legal)
        return
    grid = grid_of(plan)
    if grid is None or len(plan.stages) < 2 or len(plan.order) != len(grid.devices):
        return
    order = ORDERS[name]
    if len(plan.stages) != grid.pp * order.chunks:
        rule, legal = f"has {order.chunks} stages on each pipeline rank", '"" (an order of no name)'
        yield _wrong("order_name", name, rule, legal)
        return
    if (why := order.refused(grid.pp, plan.microbatches)) is not None:
        yield _wrong("order_name", name, f"is not possible: {why}", '"" (an order of no name)')
        return
    if not order.by_costs and played_by(plan, grid) != as_named(plan, grid):
        rule = "plays other actions than the devices of this plan"
        yield _wrong("order_name", name, rule, '"" (an order of no name), or its own actions')


def played_by(plan: Plan, grid: Grid) -> Ranks:
    """What the first device of each pipeline rank plays."""
    ascending = sorted(grid.devices)
    return tuple(plan.order[ascending.index(row[0])] for row in grid.pipes)


def as_named(plan: Plan, grid: Grid) -> Ranks:
    """What each pipeline rank plays by the order's name, for stages that are alike."""
    order = ORDERS[plan.order_name]
    if order.slices > 1:
        order = order.cut(1 + max(each.token_slice for own in plan.order for each in own))
    return plan_order(order, grid.pp, plan.microbatches, Costs.equal(len(plan.stages)))


def estimate_violations(plan: Plan, cluster: Cluster | None) -> Iterator[Violation]:
    """Times and bytes that are none, and unused devices that are used or not there."""
    estimate, search = plan.estimate, plan.search
    if estimate is not None:
        for field in ("step_s", "compute_s", "comm_s", "exposed_comm_s"):
            seconds = getattr(estimate, field)
            if not 0 <= seconds < math.inf:
                yield _wrong(f"estimate.{field}", seconds, "is no time", "seconds from 0")
        for index, causes in enumerate(estimate.memory):
            for cause, n_bytes in causes.items():
                if n_bytes < 0:
                    path = f"estimate.memory[{index}].{cause}"
                    yield _wrong(path, n_bytes, "is no amount", "bytes from 0")
                    return
    if search is not None:
        used = {device for stage in plan.stages for row in stage.placements for device in row}
        for device in search.unused_devices:
            there = cluster is None or 0 <= device < cluster.n_devices
            if device in used or not there:
                rule = "is used" if device in used else "is no device of the cluster"
                yield _wrong("search.unused_devices", device, rule, "devices of no stage")
                return


def _wrong(field: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"plan.{field}", value=value, rule=rule, legal=legal)
