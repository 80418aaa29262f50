"""One training step over all processes.

The common case (every step, mean, dense) goes through the backend's own collectives: buckets and
FSDP2 sum gradients, one small all-reduce at the end carries what all ranks must agree on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..algo.rule import Rule
from ..graph.loss import cross_entropy
from .apply.data import Applied, Sharded
from .buckets import Replicated
from .device_time import DeviceTimes
from .mesh import World
from .state import materialise
from .timing import StepTimes, step_times


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Samples on this process's device, and their labels.

    `n_samples` 0 marks a filler: samples whose labels carry no loss, run only so that this rank
    takes part in the collectives of its layers.
    """

    fields: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    n_samples: int


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to, the same on all ranks but for `times.step_s`.

    `loss` is the mean over all labels that carry loss. A skipped step has a reason and, where one
    rank is to blame, its number. `memory_bytes` is the highest peak of any device.
    """

    loss: float | None
    grad_norm: float | None
    weight: float
    reason: str | None
    rank: int | None
    stop: bool
    memory_bytes: int
    times: StepTimes

    @property
    def skipped(self) -> bool:
        """Whether no parameter changed."""
        return self.reason is not None


class Driver:
    """Plays training steps on an applied stage; all ranks call `step` together."""

    def __init__(
        self,
        applied: Applied,
        world: World,
        rule: Rule,
        *,
        clip_norm: float | None = None,
    ) -> None:
        self.applied = applied
        self._world = world
        self._clip_norm = clip_norm
        self._trainable = applied.trainable
        masters = [parameter.master for parameter in self._trainable]
        kinds = (
            [master for master in masters if not isinstance(master, DTensor)],
            [master for master in masters if isinstance(master, DTensor)],
        )
        self.optimizers = tuple(rule.optimizer(kind) for kind in kinds if kind)
        for optimizer in self.optimizers:
            materialise(optimizer)
        self._rates = [
            [group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers
        ]
        self._is_first_replica = applied.layout.replica == 1 or (
            world.coordinates(applied.layout)[0] == 0
        )
        self._device_times = None if world.accelerator.on_host else DeviceTimes(world.accelerator)
        self.begin()

    def begin(self) -> None:
        """Start the clock of the next step here: what came since the last one is not counted."""
        self._mark_s = time.perf_counter()
        self._mark_blocked_s = self.applied.traffic.blocked_s

    def step(
        self,
        microbatches: Sequence[Microbatch],
        *,
        nominal_weight: float,
        rate_factor: float = 1.0,
        stop: bool = False,
    ) -> StepResult:
        """Accumulate gradients over the microbatches, agree with all ranks, update.

        `nominal_weight` (labels that would carry loss if all did, over all ranks) scales the
        backward pass; the exact weight corrects it afterwards. `rate_factor` multiplies the
        rule's rates. `stop` is this rank's wish to end; the result has the wish of any.
        """
        profiled = nullcontext() if self._device_times is None else self._device_times.step()
        with profiled, self._buffers_kept() as restore:
            loss_sum, weight = self._accumulate(microbatches, nominal_weight)
            agreed = self._agree(loss_sum, weight, stop)
            reason, rank, norm = self._judge(agreed, nominal_weight)
            if reason is None:
                self._update(agreed, norm, nominal_weight, rate_factor)
            else:
                restore()
        self._forget()
        step_s = time.perf_counter() - self._mark_s
        blocked_s = self.applied.traffic.blocked_s - self._mark_blocked_s
        self.begin()
        return StepResult(
            loss=agreed.loss_sum / agreed.weight if reason is None else None,
            grad_norm=norm if reason is None else None,
            weight=agreed.weight,
            reason=reason,
            rank=rank,
            stop=agreed.stop,
            memory_bytes=agreed.memory_bytes,
            times=step_times(step_s, blocked_s, agreed.compute_s, self._world.rank)
            if self._device_times is None
            else self._device_times.split(step_s),
        )

    def _accumulate(
        self, microbatches: Sequence[Microbatch], nominal_weight: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        applied = self.applied
        applied.buckets.begin()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._world.device)
        weight = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for index, microbatch in enumerate(microbatches):
            applied.begin_microbatch(last=index == len(microbatches) - 1)
            with self._buffers_kept(fillers_only=True) as restore:
                logits = applied.stage(microbatch.fields)
                total, count = cross_entropy(logits, microbatch.labels)
                (total / nominal_weight).backward()  # type: ignore[no-untyped-call]
                if not microbatch.n_samples:
                    restore()
            loss_sum += total.detach()
            weight += count
        applied.buckets.finish()
        return loss_sum, weight

    def _agree(self, loss_sum: torch.Tensor, weight: torch.Tensor, stop: bool) -> _Agreed:
        """The end-of-step all-reduce: everything that all ranks must know, in one vector."""
        world, trainable = self._world, self._trainable
        replicated = _square_sum(self.applied.buckets.grads, world.device)
        sharded = _square_sum(self._sharded_grads(), world.device)
        blocked_s = self.applied.traffic.blocked_s - self._mark_blocked_s
        compute_s = time.perf_counter() - self._mark_s - blocked_s
        ours = torch.zeros(world.n_ranks, 2, dtype=torch.float64)
        ours[world.rank, 0] = compute_s
        ours[world.rank, 1] = world.accelerator.peak_bytes()
        not_finite = torch.zeros(world.n_ranks, dtype=torch.float64, device=world.device)
        not_finite[world.rank] = ~torch.isfinite(loss_sum)
        used = torch.tensor([float(p.used) for p in trainable], dtype=torch.float64)
        host = torch.cat([torch.tensor([float(stop)], dtype=torch.float64), ours.flatten(), used])
        device = torch.stack(
            [
                loss_sum,
                weight,
                replicated if world.is_first else torch.zeros_like(replicated),
                sharded if self._is_first_replica else torch.zeros_like(sharded),
            ]
        )
        vector = torch.cat([device, not_finite, host.to(world.device)])
        if world.group is not None:
            self.applied.traffic.all_reduce(vector, world.group)
        return _Agreed.read(vector.tolist(), world.n_ranks)

    def _judge(
        self, agreed: _Agreed, nominal_weight: float
    ) -> tuple[str | None, int | None, float]:
        """Why the step is skipped (None: it is not), the rank to blame, the gradient's norm."""
        factor = nominal_weight / agreed.weight if agreed.weight else 0.0
        norm = math.sqrt(agreed.square_sum) * factor if agreed.square_sum >= 0 else math.nan
        if any(agreed.not_finite):
            return "loss is not finite", agreed.not_finite.index(True), norm
        if not agreed.weight:
            return "no label carries loss", None, norm
        if not math.isfinite(norm):
            return "gradient norm is not finite", None, norm
        return None, None, norm

    def _update(
        self, agreed: _Agreed, norm: float, nominal_weight: float, rate_factor: float
    ) -> None:
        coefficient = nominal_weight / agreed.weight
        if self._clip_norm is not None:
            coefficient *= min(1.0, self._clip_norm / (norm + 1e-6))
        for parameter, used in zip(self._trainable, agreed.used, strict=True):
            if not used:
                parameter.master.grad = None
            elif isinstance(parameter, Replicated):
                parameter.master.grad = parameter.grad
        if coefficient != 1.0:
            torch._foreach_mul_(self._summed_grads(), coefficient)
        for optimizer, rates in zip(self.optimizers, self._rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * rate_factor
            optimizer.step()
        self.applied.copy_masters()

    def _sharded_grads(self) -> list[torch.Tensor]:
        grads = (p.master.grad for p in self._trainable if isinstance(p, Sharded))
        return [grad.to_local() for grad in grads if isinstance(grad, DTensor)]

    def _summed_grads(self) -> list[torch.Tensor]:
        """All gradients of this rank after their reduction, each once."""
        return [*self.applied.buckets.grads, *self._sharded_grads()]

    def _forget(self) -> None:
        for parameter in self._trainable:
            parameter.used = False
            parameter.master.grad = None

    @contextmanager
    def _buffers_kept(self, *, fillers_only: bool = False) -> Iterator[Any]:
        """Gives a function that puts the weights' buffers back as they are now."""
        live = [slot.tensor for slot in self.applied.buffers]
        if not live or (fillers_only and not self.applied.units):
            yield lambda: None
            return
        kept = [tensor.clone() for tensor in live]
        yield lambda: [tensor.copy_(old) for tensor, old in zip(live, kept, strict=True)]


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """The end-of-step vector after its all-reduce."""

    loss_sum: float
    weight: float
    square_sum: float
    not_finite: tuple[bool, ...]
    stop: bool
    compute_s: tuple[float, ...]
    memory_bytes: int
    used: tuple[bool, ...]

    @staticmethod
    def read(values: list[float], n_ranks: int) -> _Agreed:
        own = 5 + n_ranks
        return _Agreed(
            loss_sum=values[0],
            weight=values[1],
            square_sum=values[2] + values[3],
            not_finite=tuple(flag > 0 for flag in values[4 : 4 + n_ranks]),
            stop=values[4 + n_ranks] > 0,
            compute_s=tuple(values[own : own + 2 * n_ranks : 2]),
            memory_bytes=int(max(values[own + 1 : own + 2 * n_ranks : 2])),
            used=tuple(flag > 0 for flag in values[own + 2 * n_ranks :]),
        )


def _square_sum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all entries, float64 over float32 norms of each tensor."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return norms.double().square().sum()
