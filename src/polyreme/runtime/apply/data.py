"""The data axes of a stage: replicas, and shards of its state by level."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ...plan.ir import Level
from ..applied import Sharded, Unit
from ..bucket import Replicated
from ..reduction import reduce_unused, sum_gradients, watch
from ..stage import Body, Slot
from ..timing import TimedAllGather, TimedReduceScatter, Traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def replicate(
    slots: Iterable[Slot], dtype: torch.dtype
) -> tuple[dict[str, Replicated], dict[str, torch.Tensor]]:
    """Keep whole parameters, trainable and frozen; under bfloat16 compute with copies of them."""
    trainable: dict[str, Replicated] = {}
    frozen: dict[str, torch.Tensor] = {}
    for slot in slots:
        master = slot.tensor
        assert isinstance(master, nn.Parameter)
        working = master
        if dtype == torch.bfloat16 and not stays_wide(slot):
            working = nn.Parameter(master.to(dtype), requires_grad=master.requires_grad)
            slot.put(working)
        if master.requires_grad:
            trainable[slot.name] = Replicated(name=slot.name, master=master, working=working)
        else:
            frozen[slot.name] = master
    return trainable, frozen


def shard(
    bodies: dict[str, Body],
    slots: Sequence[Slot],
    level: Level,
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype,
    stays: bool,
    traffic: Traffic,
) -> Unit:
    """Split the parameters of these layers over the mesh; those that stay wide are none of them.

    With `stays` they are needed again as soon as their forward pass is over.
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if dtype == torch.bfloat16
        else MixedPrecisionPolicy()
    )
    modules = list(bodies.values())
    whole: Any = modules if len(modules) > 1 else modules[0]
    ours = {slot.tensor for slot in slots}
    fully_shard(
        whole,
        mesh=mesh,
        reshard_after_forward=level == "params" and not stays,
        mp_policy=policy,
        ignored_params={p for body in modules for p in body.parameters() if p not in ours},
    )
    module: Any = modules[0]
    sum_gradients(module)
    reduce_unused(module)
    if all(_only_looks_up(body, slots) for body in modules):
        module.set_unshard_in_backward(False)
    module.set_custom_all_gather(TimedAllGather(traffic))
    n_replicas = mesh.size(0) if mesh.ndim == 2 else 1
    reduce_scatter = TimedReduceScatter(traffic, n_replicas)
    module.set_custom_reduce_scatter(reduce_scatter)
    if n_replicas > 1:
        module.set_all_reduce_hook(reduce_scatter.after_all_reduce)
    trainable = tuple(Sharded(slot=slot) for slot in slots if slot.tensor.requires_grad)
    for parameter in trainable:
        bodies[parameter.slot.layer].call_before_first(watch(parameter))
    return Unit(
        module=module,
        bodies=tuple(bodies.values()),
        level=level,
        layers=tuple(bodies),
        parameters=trainable,
        reduce_scatter=reduce_scatter,
    )


def prefetch(units: Sequence[Unit], stages: Iterable[Sequence[str]], *, ahead: bool) -> None:
    """While a unit computes, gather the next one of its stage, forward and backward.

    Unless `ahead`, each is gathered when it is needed. On host memory the host would wait for each
    gather that is not asked for so.
    """
    for layers in stages:
        here = [unit for unit in units if not set(layers).isdisjoint(unit.layers)]
        at = {id(unit): [layers.index(x) for x in unit.layers if x in layers] for unit in here}
        forward = sorted(here, key=lambda unit: min(at[id(unit)]))
        for unit, after in pairwise(forward):
            if ahead:
                unit.module.set_modules_to_forward_prefetch([after.module])
        backward = sorted(here, key=lambda unit: max(at[id(unit)]))
        for before, unit in zip([*backward[:1], *backward], backward, strict=False):
            # Without a list FSDP2 takes what it guesses; one that is there already costs nothing.
            target = before if ahead else unit
            unit.module.set_modules_to_backward_prefetch([target.module])
            unit.module._set_unshard_async_op(ahead and _on_host(unit))


def _on_host(unit: Unit) -> bool:
    return any(p.device.type == "cpu" for p in unit.module.parameters())


def stays_wide(slot: Slot) -> bool:
    """Whether a parameter keeps float32 under bfloat16, and is whole on each device.

    Batch norm's statistics are float32 and its operators want weights of the same dtype; a
    parameter without dimensions costs nothing and does not widen its results.
    """
    owner = slot.places[0][0]
    return isinstance(owner, nn.modules.batchnorm._BatchNorm) or slot.tensor.dim() == 0


def _only_looks_up(body: Body, slots: Iterable[Slot]) -> bool:
    """Whether the backward pass of the layer reads no parameter: all are tables of embeddings."""
    owners = [module for slot in slots for module, _ in slot.places]
    return not body.recompute and all(isinstance(owner, nn.Embedding) for owner in owners)
