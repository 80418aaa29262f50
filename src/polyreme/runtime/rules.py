"""The rule of a run as optimizers over this process's masters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from ..algo.optimizer import RuleOptimizer
from ..algo.rule import Rule
from .applied import Applied

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Optimizers:
    """Those of a run, and those of `all` whose parameters are of one scattered bucket each.

    `by_bucket` is empty where buckets cannot be updated one by one.
    """

    all: tuple[torch.optim.Optimizer, ...]
    by_bucket: tuple[torch.optim.Optimizer, ...] = ()


def optimizers(rule: Rule, applied: Applied) -> Optimizers:
    """Those of torch if it has the rule, one a kind of tensor; else one that plays it on all.

    Sums of one tensor go over the devices that hold parts of it, those of all tensors over the
    devices of a replica; replicas have the same parts, and so come to the same sums.
    """
    trainable, places = applied.trainable, applied.places
    masters = [parameter.master for parameter in trainable]
    apart = [[member.master for member in each.members] for each in applied.buckets.scattered]
    once = {id(master) for each in apart for master in each}
    whole = [m for m in masters if not isinstance(m, DTensor) and id(m) not in once]
    shards = [master for master in masters if isinstance(master, DTensor)]
    kinds: tuple[Sequence[torch.Tensor], ...] = (*apart, whole, shards)
    native = [rule.native(kind) for kind in kinds if kind]
    made = tuple(optimizer for optimizer in native if optimizer is not None)
    if len(made) == len(native) and (native or rule.by_entry):
        return Optimizers(all=made, by_bucket=made[: len(apart)])
    if places.replica is None:
        return Optimizers(all=(RuleOptimizer(masters, rule),) if masters else ())

    def over(group: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def summed(partial: torch.Tensor) -> torch.Tensor:
            if group is not None:
                applied.traffic.all_reduce(partial, group, alike=False)
            return partial

        return summed

    by_id = {id(parameter.master): parameter for parameter in trainable}
    in_stage = {key: applied.counts_in_replica(p, in_stage=True) for key, p in by_id.items()}
    in_model = {key: applied.counts_in_replica(p, in_stage=False) for key, p in by_id.items()}
    played = RuleOptimizer(
        masters or [{"params": []}],  # a stage may train nothing
        rule,
        over_devices=over(places.inner),
        over_stages=over(places.replica),
        counts=lambda master, per_tensor: (in_stage if per_tensor else in_model)[id(master)],
        device=applied.device,
    )
    return Optimizers(all=(played,))
