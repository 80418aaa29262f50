"""A bucket: gradients of several parameters in one flat buffer, reduced together."""

from __future__ import annotations

from collections.abc import Callable, Container
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
    """Gradients of several parameters in one flat buffer, all-reduced.

    One that is `brief` has its buffer from a step's first gradient to the next step's beginning.
    """

    def __init__(self, members: list[Replicated], n_ranks: int = 1, *, brief: bool = False) -> None:
        first = members[0].master
        self.members = members
        self._brief = brief
        self.n_ready = 0
        self._work: Started | None = None
        self._came: dict[str, tuple[Replicated, torch.Tensor]] = {}
        self._came_bytes = 0
        self._enough_bytes = 0 if first.device.type == "cpu" else _POUR_BYTES
        self._sizes = [member.master.numel() for member in members]
        self._padded = -(-sum(self._sizes) // n_ranks) * n_ranks
        self.flat = torch.empty(0, dtype=first.dtype, device=first.device)
        if not brief:
            self._lay()

    def _lay(self) -> None:
        """Make the buffer; what no gradient is written to is zero."""
        n = sum(self._sizes)
        self.flat = self.flat.new_empty(self._padded)
        self.flat[n:] = 0
        for member, part in zip(self.members, torch.split(self.flat[:n], self._sizes), strict=True):
            member.grad = part.view_as(member.master)

    def begin(self) -> None:
        """Start a step."""
        self.n_ready = 0
        if self._brief:
            self.drop()

    def drop(self) -> None:
        """Have no buffer."""
        self.flat = self.flat.new_empty(0)
        for member in self.members:
            member.grad = self.flat

    @property
    def reduced(self) -> torch.Tensor:
        """What of it holds sums after the reduction."""
        return self.flat

    def begin_filling(self) -> None:
        """Gradients of a new step are about to be written here."""
        if self.flat.numel() < self._padded:
            self._lay()

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

    def __init__(
        self, members: list[Replicated], rank: int, n_ranks: int, *, brief: bool = False
    ) -> None:
        self._rank, self._n_ranks = rank, n_ranks
        self._rows: torch.Tensor | None = None
        self._then: Callable[[], None] | None = None
        super().__init__(members, n_ranks, brief=brief)
        n = self._padded // n_ranks
        self._interval = rank * n, (rank + 1) * n

    @property
    def _parts(self) -> torch.Tensor:
        return self.flat.view(self._n_ranks, -1)

    @property
    def _own(self) -> torch.Tensor:
        return self._parts[self._rank]

    def begin(self) -> None:
        """Start a step; what is gathered for an update that is to come is kept until then."""
        if self._then is None:
            super().begin()
        self.n_ready = 0

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
        super().begin_filling()

    def settle(self) -> None:
        """Have what is gathered, and done what was to be done with it."""
        if self._then is not None:
            self.finish()
            then, self._then = self._then, None
            then()
            if self._brief:
                self.drop()
