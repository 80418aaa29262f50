"""The rule of a run as optimizers over whole and sharded masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from ..algo.optimizer import RuleOptimizer
from ..algo.rule import Rule
from .timing import Traffic

if TYPE_CHECKING:
    import torch


def optimizers(
    rule: Rule, masters: Sequence[torch.Tensor], traffic: Traffic
) -> tuple[torch.optim.Optimizer, ...]:
    """Those of torch if it has the rule, one a kind of tensor; else one that plays it on all.

    Whole masters are the same on all ranks; shards (DTensors) are of one mesh, whose axis "shard"
    the sums of the rule go over. Replicas have the same shards, and so come to the same sums.
    """
    whole = [master for master in masters if not isinstance(master, DTensor)]
    shards = [master for master in masters if isinstance(master, DTensor)]
    native = [rule.native(kind) for kind in (whole, shards) if kind]
    made = tuple(optimizer for optimizer in native if optimizer is not None)
    if len(made) == len(native):
        return made
    if not shards:
        return (RuleOptimizer(masters, rule),)
    mesh = shards[0].device_mesh
    group = mesh.get_group("shard")

    def over_devices(partial: torch.Tensor) -> torch.Tensor:
        traffic.all_reduce(partial, group)
        return partial

    first = mesh.get_local_rank("shard") == 0
    return (RuleOptimizer(masters, rule, over_devices=over_devices, counts_whole=first),)
