"""Gradient buckets: flat buffers that are summed over ranks while the backward pass runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .timing import Started, Traffic, all_gather, reduce_scatter

_POUR_BYTES = 2**25  # of gradients that wait on an accelerator, to be added at once


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


class Bucket:
    """Gradients of several parameters in one flat buffer, all-reduced."""

    def __init__(self, members: list[Replicated], n_ranks: int = 1) -> None:
        first = members[0].master
        self.members = members
        self.n_ready = 0
        self._work: Started | None = None
        self._came: dict[str, tuple[Replicated, torch.Tensor]] = {}
        self._came_bytes = 0
        self._enough_bytes = 0 if first.device.type == "cpu" else _POUR_BYTES
        sizes = [member.master.numel() for member in members]
        padded = -(-sum(sizes) // n_ranks) * n_ranks
        self.flat = torch.zeros(padded, dtype=first.dtype, device=first.device)
        whole = self.flat[: sum(sizes)]
        for member, part in zip(members, torch.split(whole, sizes), strict=True):
            member.grad = part.view_as(member.master)

    @property
    def reduced(self) -> torch.Tensor:
        """What of it holds sums after the reduction."""
        return self.flat

    def begin_filling(self) -> None:
        """Gradients of a new step are about to be written here."""

    def take(self, member: Replicated, gradient: torch.Tensor) -> None:
        """Add a gradient; on accelerators with others, since each by itself costs the host time."""
        if member.name in self._came:
            self.pour()
        self._came[member.name] = member, gradient
        self._came_bytes += gradient.nbytes
        if self._came_bytes >= self._enough_bytes or len(self._came) == len(self.members):
            self.pour()

    def pour(self) -> None:
        """Have all that was taken in the buffer."""
        if not self._came:
            return
        self.begin_filling()
        added = [(m.grad, gradient) for m, gradient in self._came.values() if m.used]
        first = [(m.grad, gradient) for m, gradient in self._came.values() if not m.used]
        if first:
            torch._foreach_copy_([own for own, _ in first], [new for _, new in first])
        if added:
            torch._foreach_add_([own for own, _ in added], [new for _, new in added])
        for member, _ in self._came.values():
            member.used = True
        self._came.clear()
        self._came_bytes = 0

    def start(self, group: Any, traffic: Traffic) -> None:
        """Begin the reduction."""
        traffic.note_given(self.flat)
        self._work = traffic.start_all_reduce(self.flat, group)

    def finish(self) -> None:
        """Wait until it is through."""
        if self._work is not None:
            self._work.wait()
            self._work = None


class Scattered(Bucket):
    """One whose all-reduce is in halves: each rank sums a part, and gathers the others' later.

    On host memory parts are exchanged all to all, since gloo's reduce-scatter is an all-reduce;
    they are added in the order of ranks.

    Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained
    All-Reduce Pipelining", ICDCS 2023.
    """

    def __init__(self, members: list[Replicated], rank: int, n_ranks: int) -> None:
        super().__init__(members, n_ranks)
        self._n_ranks = n_ranks
        self._parts = self.flat.view(n_ranks, self.flat.numel() // n_ranks)
        self._rows: torch.Tensor | None = None
        self._own = self._parts[rank]
        first = rank * self._own.numel()
        self._interval = first, first + self._own.numel()
        self._then: Callable[[], None] | None = None

    @property
    def reduced(self) -> torch.Tensor:
        """This rank's part."""
        return self._own

    def pieces(self, counts: Container[str]) -> list[torch.Tensor]:
        """What the part of this rank holds of those parameters."""
        first, end = self._interval
        found, at = [], 0
        for member in self.members:
            low, high = max(first, at), min(end, at + member.master.numel())
            if low < high and member.name in counts:
                found.append(self.flat[low:high])
            at += member.master.numel()
        return found

    def start(self, group: Any, traffic: Traffic) -> None:
        """Begin to sum the parts."""
        traffic.note_given(self.flat)
        traffic.count(self.flat.nbytes, self._n_ranks, 1)
        flat, own = self.flat, self._own

        def call() -> Any:
            if flat.device.type != "cpu":
                return reduce_scatter(own, flat, group=group, async_op=True)
            self._rows = torch.empty_like(flat)
            return dist.all_to_all_single(self._rows, flat, group=group, async_op=True)

        self._work = traffic.start("reduce_scatter", flat, self._n_ranks, call)

    def finish(self) -> None:
        """Wait for what was begun: of all gradients, or of this rank's part alone."""
        super().finish()
        if self._rows is not None:
            torch.sum(self._rows.view_as(self._parts), 0, out=self._own)
            self._rows = None

    def gather(self, group: Any, traffic: Traffic, then: Callable[[], None] | None = None) -> None:
        """Begin to gather the parts; `then` is called when they are needed and there."""
        traffic.count(self.flat.nbytes, self._n_ranks, 1)
        flat, own = self.flat, self._own if self.flat.device.type != "cpu" else self._own.clone()
        self._work = traffic.start(
            "all_gather",
            flat,
            self._n_ranks,
            lambda: all_gather(flat, own, group=group, async_op=True),
            stands=then is None,
        )
        self._then = then

    def begin_filling(self) -> None:
        """What was gathered is used before it is overwritten."""
        self.settle()

    def settle(self) -> None:
        """Have what is gathered, and done what was to be done with it."""
        if self._then is not None:
            self.finish()
            then, self._then = self._then, None
            then()


class Buckets:
    """Sums gradients of replicated parameters over a group of ranks (None: this one alone).

    Buckets are fixed at the start: `parameters` in reverse order, those of a dtype together, a
    bucket closed as soon as it holds `bucket_bytes`. They are reduced in this order, from one
    thread, whichever parameters got a gradient on which rank; one without contributes zeros. So
    ranks cannot disagree about which collective comes next.

    With `decouple` each rank sums a part of a bucket, and the parts are gathered: in `finish`, or
    after it if `later`, when who set this calls `gather_later`. Parameters in `joint`, of which
    sums are needed at once, are in buckets of their own that are all-reduced.
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
            Scattered(members, group.rank(), group.size())
            for members in _close(apart, bucket_bytes)
        )
        whole = [p for p in given if not halves or p.name in joint]
        self._buckets: list[Bucket] = [
            *self.scattered,
            *(Bucket(members) for members in _close(whole, bucket_bytes)),
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
