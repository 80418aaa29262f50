"""One training step over all processes.

The common case (every step, mean, dense) goes through the backend's own collectives: buckets and
FSDP2 sum gradients, one small all-reduce at the end carries what all ranks must agree on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor

from ..algo.rule import Rule
from .agreed import Agreed, Own, Said
from .applied import Applied, Sharded
from .bucket import Scattered
from .device_time import DeviceTimes
from .executor import Executor
from .foreseen import Foreseen, can_be, foreseen
from .mesh import World
from .passes import Microbatch, buffers_kept
from .rules import optimizers
from .state import materialise
from .timing import StepTimes, step_times


class OnGradients(Protocol):
    """Looks at the gradients of a step before they are clipped."""

    def __call__(
        self, gradients: Mapping[str, torch.Tensor | None], *, loss: float, weight: float
    ) -> None:
        """Mean gradients by whole-model name, on all ranks together; the step's loss and weight.

        A sharded one is a DTensor; None stands for a parameter that nothing used.
        """


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to, the same on all ranks but for `times.step_s`.

    `loss` is the mean over all labels that carry loss. A skipped step has a reason and the ranks
    whose samples caused it, if any did. `said` holds what each rank told, `trails` a signature of
    the collectives that each has called. `memory_bytes` is the highest peak of any device.
    """

    loss: float | None
    grad_norm: float | None
    weight: float
    reason: str | None
    bad_ranks: tuple[int, ...]
    said: tuple[Said, ...]
    trails: tuple[int, ...]
    memory_bytes: int
    times: StepTimes

    @property
    def skipped(self) -> bool:
        """Whether no parameter changed."""
        return self.reason is not None

    @property
    def rank(self) -> int | None:
        """The first of the ranks to blame."""
        return self.bad_ranks[0] if self.bad_ranks else None

    @property
    def stop(self) -> bool:
        """Whether any rank wants the run to end."""
        return any(said.stop for said in self.said)


class Driver:
    """Plays training steps on an applied stage; all ranks call `step` together."""

    def __init__(
        self,
        applied: Applied,
        world: World,
        rule: Rule,
        *,
        clip_norm: float | None = None,
        on_gradients: OnGradients | None = None,
    ) -> None:
        self.applied = applied
        self._world = world
        self._clip_norm = clip_norm
        self._on_gradients = on_gradients
        self._trainable = applied.trainable
        made = optimizers(rule, applied)
        self.optimizers = made.all
        for optimizer in self.optimizers:
            materialise(optimizer)
        self._rates = {
            optimizer: [group["lr"] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        }
        self.executor = Executor(applied)
        if self.executor.stash is not None:
            self.executor.stash.step = self._stash_step
        # Whoever looks at gradients wants them whole.
        applied.buckets.later = bool(made.by_bucket) and on_gradients is None
        self._by_bucket = made.by_bucket if applied.buckets.later else ()
        self._foresees = (
            not world.accelerator.on_host
            and on_gradients is None
            and self.executor.stash is None
            and not (self._by_bucket or applied.units)
            and can_be(self.optimizers)
        )
        self._ahead: Callable[[torch.Tensor], None] | None = None
        self._rate_factor = 1.0
        self._counted = [p for p in self._trainable if applied.counts(p)]
        self._device_times = None if world.accelerator.on_host else DeviceTimes(world.accelerator)
        self.begin()

    def begin(self) -> None:
        """Start the clock of the next step here: what came since the last one is not counted."""
        self._mark_s = time.perf_counter()
        self._mark_blocked_s = self.applied.traffic.blocked_s
        self.applied.traffic.begin()

    def step(
        self,
        microbatches: Mapping[int, Microbatch],
        *,
        nominal_weight: float,
        rate_factor: float = 1.0,
        say: Callable[[], Said] = Said,
    ) -> StepResult:
        """Gradients over the microbatches, which are given by number; agree with all, update.

        `nominal_weight` (labels that would carry loss if all did, over all ranks) scales the
        backward pass; the exact weight corrects it afterwards. `rate_factor` multiplies the
        rule's rates. What `say` gives after the backward pass is told to all ranks.
        """
        self._rate_factor = rate_factor
        profiled = nullcontext() if self._device_times is None else self._device_times.step()
        with profiled, buffers_kept(self.applied) as restore:
            loss_sum, weight = self.executor(microbatches, nominal_weight)
            updates = self._foresees and all(p.used for p in self._trainable)
            self._ahead = partial(self._update_ahead, nominal_weight) if updates else None
            agreed = self._agree(loss_sum, weight, say())
            reason, bad_ranks, norm = self._judge(agreed, nominal_weight)
            if reason is not None and self.executor.stash is None:
                restore()
            elif self.executor.stash is None and self._ahead is None:
                self._update(agreed, norm, nominal_weight, rate_factor)
        self._forget()
        step_s = time.perf_counter() - self._mark_s
        blocked_s = self.applied.traffic.blocked_s - self._mark_blocked_s
        self.begin()
        return StepResult(
            loss=agreed.loss_sum / agreed.weight if reason is None else None,
            grad_norm=norm if reason is None and self.executor.stash is None else None,
            weight=agreed.weight,
            reason=reason,
            bad_ranks=bad_ranks,
            said=agreed.said,
            trails=tuple(int(own.trail) for own in agreed.own),
            memory_bytes=int(max(own.peak_bytes for own in agreed.own)),
            times=step_times(
                step_s,
                blocked_s,
                [own.compute_s for own in agreed.own],
                self._world.rank,
                [own.hidden_s for own in agreed.own],
            )
            if self._device_times is None
            else self._device_times.split(step_s),
        )

    def _agree(self, loss_sum: torch.Tensor, weight: torch.Tensor, say: Said) -> Agreed:
        """The end-of-step all-reduce: everything that all ranks must know, in one vector."""
        world, trainable = self._world, self._trainable
        counted = [] if self.executor.stash is not None else self._counted_grads()
        squares = _square_sum(counted, world.device)
        blocked_s = self.applied.traffic.blocked_s - self._mark_blocked_s
        own = Own(
            stop=say.stop,
            save=say.save,
            trail=world.record.trail,
            compute_s=time.perf_counter() - self._mark_s - blocked_s,
            hidden_s=self.applied.traffic.hidden_s(),
            peak_bytes=world.accelerator.peak_bytes(),
        )
        rows = torch.zeros(world.n_ranks, len(own), dtype=torch.float64)
        rows[world.rank] = torch.tensor(own, dtype=torch.float64)
        uses = {p.name for p in trainable if p.used}
        used = torch.tensor([float(n in uses) for n in self.applied.names], dtype=torch.float64)
        bad = torch.zeros(world.n_ranks, 2, dtype=torch.float64, device=world.device)
        bad[world.rank, 0] = ~torch.isfinite(loss_sum)
        finite = self.applied.traffic.all_finite()
        if finite is not None:
            bad[world.rank, 1] = ~finite
        elif world.group is not None:
            bad[world.rank, 1] = ~torch.isfinite(squares)
        shares = float(self.applied.places.cell.tp == 0)  # tensor parts come to the same loss
        sums = torch.stack([loss_sum * shares, weight * shares, squares])
        # Without waiting: the device is still at its backward pass.
        host = torch.cat([rows.flatten(), used]).to(world.device, non_blocking=True)
        vector = torch.cat([sums, bad.flatten(), host])
        if world.group is not None:
            values = self.applied.traffic.sums(vector, world.group, self._ahead)
            return Agreed.read(values, world.n_ranks)
        if self._ahead is not None:
            self._ahead(vector)
        return Agreed.read(vector.tolist(), world.n_ranks)

    def _judge(
        self, agreed: Agreed, nominal_weight: float
    ) -> tuple[str | None, tuple[int, ...], float]:
        """Why the step is skipped (None: it is not), the ranks to blame, the gradient's norm."""
        factor = nominal_weight / agreed.weight if agreed.weight else 0.0
        norm = math.sqrt(agreed.square_sum) * factor if agreed.square_sum >= 0 else math.nan
        if any(agreed.bad_loss):
            return "loss is not finite", _where(agreed.bad_loss), norm
        if not agreed.weight:
            return "no label carries loss", (), norm
        if not math.isfinite(norm):
            alone = self._world.group is None
            ranks = (0,) if alone else _where(agreed.bad_gradient)
            return "gradient norm is not finite", ranks, norm
        return None, (), norm

    def _update_ahead(self, nominal_weight: float, vector: torch.Tensor) -> None:
        """The update of all parameters by numbers that only the device knows yet."""
        for whole in self.applied.buckets.parameters:
            whole.master.grad = whole.grad
        known = foreseen(vector, self._world.n_ranks, nominal_weight, self._clip_norm)
        self._step_by(known)

    def _step_by(self, known: Foreseen) -> None:
        with ExitStack() as given:
            for optimizer in self.optimizers:
                given.enter_context(known.given_to(optimizer))
            self._step(self._rate_factor)
        self.applied.copy_masters(self.applied.buckets.unparted)

    def _update(
        self, agreed: Agreed, norm: float, nominal_weight: float, rate_factor: float
    ) -> None:
        coefficient = nominal_weight / agreed.weight
        clip = 1.0
        if self._clip_norm is not None:
            clip = min(1.0, self._clip_norm / (norm + 1e-6))
        used = {n for n, flag in zip(self.applied.names, agreed.used, strict=True) if flag}
        for whole in self.applied.buckets.unparted:
            whole.master.grad = whole.grad if whole.name in used else None
        for parameter in self._trainable:
            if parameter.name not in used:
                parameter.master.grad = None
        if self._foresees:  # as others do, who have gradients of all parameters
            divisor = torch.tensor(1 / (coefficient * clip), device=self._world.device)
            self._step_by(Foreseen(divisor=divisor, skips=torch.zeros_like(divisor)))
            return
        if self._on_gradients is not None:
            self._scale(coefficient)
            self._on_gradients(
                {p.name: p.master.grad for p in self._trainable},
                loss=agreed.loss_sum / agreed.weight,
                weight=agreed.weight,
            )
            self._scale(clip)
        else:
            self._scale(coefficient * clip)
        if self._by_bucket:
            self._gather_later(used, rate_factor)
        self._step(rate_factor)
        self.applied.copy_masters(self.applied.buckets.unparted)

    def _gather_later(self, used: Container[str], rate_factor: float) -> None:
        """Begin to gather scattered buckets; each is updated when its first layer needs it."""
        buckets = self.applied.buckets
        pairs = list(zip(buckets.scattered, self._by_bucket, strict=True))
        buckets.gather_later(
            (bucket, partial(self._update_bucket, bucket, optimizer, used, rate_factor))
            for bucket, optimizer in (pairs[number] for number in self.applied.gathers)
        )

    def _update_bucket(
        self,
        bucket: Scattered,
        optimizer: torch.optim.Optimizer,
        used: Container[str],
        rate_factor: float,
    ) -> None:
        """The update of a bucket whose gradients have been gathered."""
        for member in bucket.members:
            member.master.grad = member.grad if member.name in used else None
        self._step_one(optimizer, rate_factor)
        for member in bucket.members:
            member.master.grad = None
        self.applied.copy_masters(bucket.members)

    def _step(self, rate_factor: float) -> None:
        for optimizer in self.optimizers:
            if optimizer not in self._by_bucket:
                self._step_one(optimizer, rate_factor)

    def _step_one(self, optimizer: torch.optim.Optimizer, rate_factor: float) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates[optimizer], strict=True):
            group["lr"] = rate * rate_factor
        optimizer.step()

    def _stash_step(self) -> None:
        """An update in the middle of a step."""
        self._step(self._rate_factor)

    def _scale(self, factor: float) -> None:
        gradients = self._summed_grads()
        if factor != 1.0 and gradients:  # a stage may have nothing to train
            torch._foreach_mul_(gradients, factor)

    def _counted_grads(self) -> list[torch.Tensor]:
        """Gradients of this rank that enter the norm, each entry of the model on one rank."""
        buckets = self.applied.buckets
        counted = {id(p) for p in self._counted}
        whole = [p for p in buckets.unparted if id(p) in counted]
        if len(whole) == len(buckets.parameters):
            found = buckets.grads
        else:
            found = [p.grad for p in whole if p.has_grad]
        if buckets.later:
            parts = {p.name for p in buckets.parameters if self.applied.counts_part(p)}
            found += [piece for each in buckets.scattered for piece in each.pieces(parts)]
        shards = (p.master.grad for p in self._counted if isinstance(p, Sharded))
        return [*found, *(g.to_local() for g in shards if isinstance(g, DTensor))]

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


def _where(flags: Sequence[bool]) -> tuple[int, ...]:
    return tuple(rank for rank, flag in enumerate(flags) if flag)


def _square_sum(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of all entries, float64 over float32 norms of each tensor."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    return norms.double().square().sum()
