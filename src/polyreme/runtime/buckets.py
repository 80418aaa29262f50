"""Gradient buckets: flat buffers that are summed over ranks while the backward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .mesh import World
from .timing import Traffic


@dataclass(kw_only=True)
class Replicated:
    """A trainable parameter of which each rank holds all.

    `master` is what the optimizer updates; `working` what the module computes with: the same
    object, or its bfloat16 copy.
    """

    name: str
    master: torch.nn.Parameter
    working: torch.nn.Parameter
    used: bool = False
    grad: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class _Bucket:
    def __init__(self, members: list[Replicated]) -> None:
        first = members[0].master
        self.members = members
        self.n_ready = 0
        self.work: Any = None
        self.flat = torch.zeros(
            sum(member.master.numel() for member in members), dtype=first.dtype, device=first.device
        )
        sizes = [member.master.numel() for member in members]
        for member, part in zip(members, torch.split(self.flat, sizes), strict=True):
            member.grad = part.view_as(member.master)


class Buckets:
    """Sums gradients of replicated parameters over all ranks.

    Buckets are fixed at the start: `parameters` in reverse order, a bucket closed as soon as it
    holds `bucket_bytes`. They are reduced in this order, from one thread, whichever parameters
    got a gradient on which rank; one without contributes zeros. So ranks cannot disagree about
    which collective comes next.
    """

    def __init__(
        self,
        parameters: Sequence[Replicated],
        *,
        bucket_bytes: int,
        overlap: bool,
        world: World,
        traffic: Traffic,
    ) -> None:
        self.parameters = tuple(parameters)
        self._overlap = overlap
        self._world = world
        self._traffic = traffic
        # A lone process has nothing to exchange: its gradients stay as autograd makes them.
        self._alone = world.group is None and all(p.working is p.master for p in self.parameters)
        groups = [] if self._alone else _close(self.parameters, bucket_bytes)
        self._buckets = [_Bucket(members) for members in groups]
        self._next = 0
        self._last = False
        for bucket in self._buckets:
            for member in bucket.members:
                hook: Any = self._hook(bucket, member)
                member.working.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def grads(self) -> list[torch.Tensor]:
        """Tensors that hold all gradients after `finish`, each once."""
        if self._alone:
            return [member.grad for member in self.parameters if member.used]
        return [bucket.flat for bucket in self._buckets]

    def begin(self) -> None:
        """Start a step: nothing has a gradient."""
        self._next = 0
        self._last = False
        for bucket in self._buckets:
            bucket.n_ready = 0
        for member in self.parameters:
            member.used = False
            member.working.grad = None
            member.master.grad = None

    def expect_last(self) -> None:
        """The next backward pass is the last of this step: reduce buckets as they fill."""
        self._last = True

    def finish(self) -> None:
        """Reduce what is left and wait for all; afterwards `grad` holds sums over ranks."""
        if self._alone:
            for member in self.parameters:
                if member.master.grad is not None:
                    member.grad, member.used = member.master.grad, True
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            if bucket.work is not None:
                self._traffic.finish(bucket.work)
                bucket.work = None

    def _hook(self, bucket: _Bucket, member: Replicated) -> Any:
        """What a parameter calls when its gradient is there.

        It holds all weakly: a tensor keeps its hooks where no collector of cycles sees them, and
        with them would stay the model and the connections of its group.
        """
        shared = member.working is member.master
        all_of_it: Any = weakref.proxy(self)
        its_bucket: Any = weakref.proxy(bucket)
        own: Any = weakref.proxy(member)

        def collect(working: torch.Tensor) -> None:
            grad = working.grad
            assert grad is not None, "the hook runs after a gradient came"
            if not own.used:
                own.grad.copy_(grad)
                own.used = True
            elif not shared:
                own.grad.add_(grad)
            # In the master's own dtype later gradients add up in the bucket by themselves.
            working.grad = own.grad if shared else None
            if all_of_it._last:
                its_bucket.n_ready += 1
                if all_of_it._overlap:
                    all_of_it._launch_ready()

        return collect

    def _launch_ready(self) -> None:
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if bucket.n_ready < len(bucket.members):
                return
            self._launch()

    def _launch(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        for member in bucket.members:
            if not member.used:
                member.grad.zero_()
        if self._world.group is not None:
            self._traffic.note_given(bucket.flat)
            bucket.work = self._traffic.start_all_reduce(bucket.flat, self._world.group)


def _close(parameters: Sequence[Replicated], bucket_bytes: int) -> list[list[Replicated]]:
    """Parameters from last to first, cut where a bucket is full."""
    groups: list[list[Replicated]] = []
    room = 0
    for parameter in reversed(parameters):
        if room <= 0:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(parameter)
        room -= parameter.master.nbytes
    return groups
