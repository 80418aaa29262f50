"""Gradient buckets: flat buffers that are summed over ranks while the backward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .timing import Traffic


@dataclass(kw_only=True)
class Replicated:
    """A trainable parameter of which each rank holds all.

    `master` is what the optimizer updates; `working` what the module computes with: the same
    object, or its bfloat16 copy. `last` says that its next gradient is the last of the step,
    `ready` that it has come.
    """

    name: str
    master: torch.nn.Parameter
    working: torch.nn.Parameter
    used: bool = False
    last: bool = False
    ready: bool = False
    grad: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def has_grad(self) -> bool:
        """Whether `grad` is there (after `Buckets.finish`)."""
        return self.grad.shape == self.master.shape


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
    """Sums gradients of replicated parameters over a group of ranks (None: this one alone).

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
        group: Any,
        traffic: Traffic,
    ) -> None:
        self.parameters = tuple(parameters)
        self._overlap = overlap
        self._group = group
        self._traffic = traffic
        # A lone process has nothing to exchange: its gradients stay as autograd makes them.
        self._alone = group is None and all(p.working is p.master for p in self.parameters)
        groups = [] if self._alone else _close(self.parameters, bucket_bytes)
        self._buckets = [_Bucket(members) for members in groups]
        self._bucket_of = {m.name: bucket for bucket in self._buckets for m in bucket.members}
        self._next = 0
        for bucket in self._buckets:
            for member in bucket.members:
                hook: Any = self._hook(bucket, member)
                member.working.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def grads(self) -> list[torch.Tensor]:
        """Tensors that hold all gradients after `finish`, each once."""
        if self._alone:
            return [member.grad for member in self.parameters if member.has_grad]
        return [bucket.flat for bucket in self._buckets]

    def begin(self) -> None:
        """Start a step: nothing has a gradient."""
        self._next = 0
        for bucket in self._buckets:
            bucket.n_ready = 0
        for member in self.parameters:
            member.used = member.last = member.ready = False
            if self._alone:
                member.grad = torch.empty(0)
            member.working.grad = None
            member.master.grad = None

    def expect_last(self, members: Iterable[Replicated]) -> None:
        """The next backward pass is the last of the step for these: reduce buckets as they fill."""
        for member in members:
            member.last = True

    def passed(self, members: Iterable[Replicated]) -> None:
        """No more gradients of these will come in this step."""
        if self._alone:
            return
        for member in members:
            self._ready(self._bucket_of[member.name], member)
        if self._overlap:
            self._launch_ready()

    def finish(self) -> None:
        """Reduce what is left and wait for all; afterwards `grad` holds sums over the group."""
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
            if grad is None:  # it is left for the weight half of this backward pass
                return
            if not own.used:
                own.grad.copy_(grad)
                own.used = True
            elif not shared:
                own.grad.add_(grad)
            # In the master's own dtype later gradients add up in the bucket by themselves.
            working.grad = own.grad if shared else None
            if own.last:
                all_of_it._ready(its_bucket, own)
                if all_of_it._overlap:
                    all_of_it._launch_ready()

        return collect

    @staticmethod
    def _ready(bucket: _Bucket, member: Replicated) -> None:
        bucket.n_ready += not member.ready
        member.ready = True

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
        if self._group is not None:
            self._traffic.note_given(bucket.flat)
            bucket.work = self._traffic.start_all_reduce(bucket.flat, self._group)


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
