"""Plans of a stack of blocks, as tests of exports want them."""

from __future__ import annotations

from typing import Any

import msgspec

from polyreme.plan.ir import Plan, Workload
from polyreme.plan.order import ORDERS
from polyreme.plan.play import Costs
from polyreme.planner.draft import Draft, Strategy
from polyreme.planner.space import write_plan

STACK = ("embed", *(f"block.{index}" for index in range(6)), "head")


def made(
    *,
    names: tuple[str, ...] = STACK,
    sizes: tuple[int, ...] = (),
    order: str = "1f1b",
    recompute: tuple[str, ...] = (),
    microbatches: int = 4,
    microbatch: int = 2,
    precision: str = "bf16",
    **strategy: Any,
) -> Plan:
    """A plan of a stack over stages of so many layers, each of the strategy."""
    each = Strategy(**strategy)
    pp = len(sizes) // ORDERS[order].chunks or 1
    cuts = [sum(sizes[:stage]) for stage in range(len(sizes) + 1)]
    batch = each.data * microbatches * microbatch
    draft = Draft(
        strategies={
            name: msgspec.structs.replace(each, recompute=name in recompute) for name in names
        },
        pp=pp,
        order=order if sizes else "",
        stages=tuple(names[cuts[s] : cuts[s + 1]] for s in range(len(sizes))),
        holders=ORDERS[order].placements(pp) if sizes else ((0,),),
        actions=ORDERS[order].actions(pp, microbatches, Costs.equal(len(sizes))) if sizes else (),
        microbatches=microbatches,
        global_batch=batch,
        bucket_bytes=2**20,
        overlap=True,
    )
    workload = Workload(
        global_batch=batch,
        seq_len=128,
        precision=precision,
        optimizer_states=2,  # type: ignore[arg-type]
    )
    return write_plan(draft, workload)
