"""Gradient buckets: flat buffers that are summed over ranks while the backward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from .bucket import Bucket, Replicated, Scattered
from .timing import Traffic


class Buckets:
    """Sums gradients of replicated parameters over a group of ranks (None: this one alone).

    Buckets are fixed at the start: `parameters` in reverse order, those of a dtype together, a
    bucket closed as soon as it holds `bucket_bytes`. They are reduced in this order, from one
    thread, whichever parameters got a gradient on which rank; one without contributes zeros. So
    ranks cannot disagree about which collective comes next.

    With `decouple` each rank sums a part of a bucket, and the parts are gathered: in `finish`, or
    after it if `later`, when who set this calls `gather_later`. Parameters in `joint`, of which
    sums are needed at once, are in buckets of their own that are all-reduced. With `brief`, for
    steps of one backward pass, buckets take memory as saved tensors give it back.
    """

    def __init__(
        self,
        parameters: Sequence[Replicated],
        *,
        bucket_bytes: int,
        overlap: bool,
        group: Any,
        traffic: Traffic,
        decouple: bool = False,
        joint: Container[str] = (),
        brief: bool = False,
    ) -> None:
        self.parameters = tuple(parameters)
        self.later = False
        self._overlap = overlap
        self._group = group
        self._traffic = traffic
        # A lone process has nothing to exchange: its gradients stay as autograd makes them.
        self._alone = group is None and all(p.working is p.master for p in self.parameters)
        given = [] if self._alone else self.parameters
        halves = decouple and group is not None and group.size() > 1
        apart = [p for p in given if halves and p.name not in joint]
        self.scattered = tuple(
            Scattered(members, group.rank(), group.size(), brief=brief)
            for members in _close(apart, bucket_bytes)
        )
        whole = [p for p in given if not halves or p.name in joint]
        self._buckets: list[Bucket] = [
            *self.scattered,
            *(Bucket(members, brief=brief) for members in _close(whole, bucket_bytes)),
        ]
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
        if self.later:
            return [bucket.reduced for bucket in self._buckets]
        return [bucket.flat for bucket in self._buckets]

    @property
    def unparted(self) -> list[Replicated]:
        """Those whose gradients are whole here after `finish`."""
        if not self.later:
            return list(self.parameters)
        return [p for p in self.parameters if not isinstance(self._bucket_of[p.name], Scattered)]

    def begin(self) -> None:
        """Start a step: nothing has a gradient."""
        self._next = 0
        for bucket in self._buckets:
            bucket.begin()
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
        """A backward pass is over, and no more gradients of these will come in this step."""
        if self._alone:
            return
        for bucket in self._buckets:
            bucket.pour()
        for member in members:
            self._ready(self._bucket_of[member.name], member)
        if self._overlap:
            self._launch_ready()

    def finish(self) -> None:
        """Reduce what is left and wait for all; afterwards `grad` holds sums over the group.

        If `later`, of scattered ones only this rank's part does.
        """
        if self._alone:
            for member in self.parameters:
                if member.master.grad is not None:
                    member.grad, member.used = member.master.grad, True
        while self._next < len(self._buckets):
            self._launch()
        for bucket in self._buckets:
            bucket.finish()
        if not self.later:
            for each in self.scattered:
                each.gather(self._group, self._traffic)
            for each in self.scattered:
                each.finish()

    def gather_later(self, order: Iterable[tuple[Scattered, Callable[[], None]]]) -> None:
        """Begin to gather buckets in that order; each one's call comes before it is needed."""
        for bucket, then in order:
            bucket.gather(self._group, self._traffic, then)

    def settle(self) -> None:
        """Wait for all that is gathered later."""
        for bucket in self.scattered:
            bucket.settle()

    def _hook(self, bucket: Bucket, member: Replicated) -> Any:
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
            if not shared or not own.used:
                its_bucket.take(own, grad)
            if shared:
                # In the master's own dtype later gradients add up in the bucket by themselves.
                its_bucket.pour()
            working.grad = own.grad if shared else None
            all_of_it._traffic.look()
            if own.last:
                all_of_it._ready(its_bucket, own)
                if all_of_it._overlap:
                    all_of_it._launch_ready()

        return collect

    @staticmethod
    def _ready(bucket: Bucket, member: Replicated) -> None:
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
        bucket.pour()
        bucket.begin_filling()
        for member in bucket.members:
            if not member.used:
                member.grad.zero_()
        if self._group is not None:
            bucket.start(self._group, self._traffic)


def _close(parameters: Sequence[Replicated], bucket_bytes: int) -> list[list[Replicated]]:
    """Parameters from last to first, cut where a bucket is full; those of a dtype together."""
    groups: list[list[Replicated]] = []
    filling: dict[torch.dtype, list[Replicated]] = {}
    room: dict[torch.dtype, int] = {}
    for parameter in reversed(parameters):
        dtype = parameter.master.dtype
        if room.get(dtype, 0) <= 0:
            filling[dtype] = []
            groups.append(filling[dtype])
            room[dtype] = bucket_bytes
        filling[dtype].append(parameter)
        room[dtype] -= parameter.master.nbytes
    return groups
