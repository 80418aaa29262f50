"""Makes profiles: runs a model's layer kinds and this group's collectives on this machine.

All processes measure at the same time, so what they take from one another (cores, memory, links)
is in the numbers; what each found is averaged, and every process returns the same profile.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ..profile.assume import MORE_DEVICES, operations
from ..profile.record import Profile
from ..profile.saved import saved_bytes
from ..profile.store import made_now
from .agree import largest, no_garbage
from .device import gradients_s_per_byte, matmul_flops, optimizer_s_per_byte
from .layers import MICROBATCHES, measure_layers
from .links import measure_links, measure_overlap

if TYPE_CHECKING:
    from ..cluster.types import Cluster
    from ..graph.layer import LayerGraph
    from ..runtime.mesh import World

HOST_BUDGET_S = 3.5
DEVICE_BUDGET_S = 30.0
LINKS_SHARE = 0.4


def measure(
    graph: LayerGraph,
    cluster: Cluster,
    precision: str,
    world: World,
    global_batch: int,
    budget_s: float | None = None,
    *,
    compiled: bool = False,
) -> Profile:
    """The profile of a model on this machine; `cluster` is what was detected here.

    No microbatch larger than `global_batch` (samples) is run, as none can be trained with.
    `budget_s` is about how long layers and collectives are run; the least that must be measured
    is measured however long it takes. With `compiled` layers are measured as torch compiles them,
    which takes longer: the compiling is no part of these seconds, nor of any time.

    Raises:
        RunError: one sample of one layer does not fit on the device.
    """
    if budget_s is None:
        budget_s = HOST_BUDGET_S if world.accelerator.on_host else DEVICE_BUDGET_S
    links_s = budget_s * LINKS_SHARE if world.group is not None else 0.0
    saved = saved_bytes(
        graph,
        precision,
        fused=not world.accelerator.on_host,
        parts=graph.tensor_degrees(MORE_DEVICES * cluster.n_devices),
    )
    world.barrier()
    held_bytes, before_bytes = world.accelerator.held_bytes(), world.accelerator.allocated_bytes()
    with no_garbage():
        sizes = tuple(size for size in MICROBATCHES if size <= global_batch)
        layers = measure_layers(
            graph, precision, world, saved, sizes, budget_s - links_s, compiled=compiled
        )
        collectives = measure_links(world, links_s, operations(graph))
        overlap = measure_overlap(world)
        flops = matmul_flops(world, precision)
        update_s = optimizer_s_per_byte(world, precision)
        gradient_s, more_s = gradients_s_per_byte(world, precision)
    if not world.accelerator.on_host:  # communicators take device memory at their first use
        gc.collect()
        # Libraries take their workspaces from torch at their first use, and keep them.
        workspaces = max(0, world.accelerator.allocated_bytes() - before_bytes)
        held_bytes = world.accelerator.held_bytes() + workspaces
    world.accelerator.release()
    world.accelerator.reset_peak()
    return Profile(
        layers=layers,
        collectives=collectives,
        optimizer_s_per_byte=update_s,
        gradient_s_per_byte=gradient_s,
        more_gradient_s_per_byte=more_s,
        matmul_flops=flops,
        overlap=overlap,
        sharded_overlap=0.0 if world.accelerator.on_host else None,  # FSDP2 waits for each there
        context_bytes=int(largest(world, held_bytes)),
        assumed=False,
        global_batch=global_batch,
        compiled=compiled,
        **made_now(graph, cluster, precision),
    )
