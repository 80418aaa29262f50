"""What communication costs a process: seconds blocked on it, and bytes sent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_api

from .record import Record

# torch 2.13 gave these two new names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Where the time of a step went: `compute_s + comm_s + wait_s = step_s`, means over ranks.

    `hidden_s` is what communication ran behind computation, and so is in `compute_s`.
    """

    step_s: float
    compute_s: float
    comm_s: float
    wait_s: float
    hidden_s: float = 0.0


def step_times(
    step_s: float,
    blocked_s: float,
    compute_s: Sequence[float],
    rank: int,
    hidden_s: Sequence[float] = (0.0,),
) -> StepTimes:
    """Split this rank's step.

    `compute_s` holds, for each rank, the time up to the end-of-step exchange in which it was not
    blocked: a rank waits for the slowest as long as it is faster. What this rank does after the
    exchange (the update) is taken as the same for all; the rest is communication.

    >>> step_times(1.0, 0.5, (0.5, 0.25), 0)
    StepTimes(step_s=1.0, compute_s=0.375, comm_s=0.5, wait_s=0.125, hidden_s=0.0)
    """
    mean = sum(compute_s) / len(compute_s)
    update_s = max(0.0, step_s - blocked_s - compute_s[rank])
    busy_s = min(step_s, mean + update_s)
    wait_s = min(step_s - busy_s, max(compute_s) - mean)
    return StepTimes(
        step_s=step_s,
        compute_s=busy_s,
        comm_s=step_s - busy_s - wait_s,
        wait_s=wait_s,
        hidden_s=sum(hidden_s) / len(hidden_s),
    )


Interval = tuple[float, float]
_INTERVALS = 10_000  # kept at most, where nobody asks what was hidden


def union_s(intervals: Iterable[Interval]) -> float:
    """Length of what the intervals cover.

    >>> union_s([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, reach = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    return total


class Started(dist.Work):
    """A collective under way; `wait` for it before its tensors are read."""

    def __init__(self, traffic: Traffic, seq: int, work: Any, begun_s: float) -> None:
        super().__init__()
        self.begun_s = begun_s
        self._traffic, self._seq, self._work = traffic, seq, work

    @property
    def is_over(self) -> bool:
        """Whether the backend is through with it."""
        return bool(self._work.is_completed())

    def wait(self, timeout: Any = None) -> bool:
        """Until it is through; the time counts as blocked."""
        traffic = self._traffic
        traffic.record.wait(self._seq)
        with traffic.record.failing(self._seq), traffic.blocked():
            self._work.wait()
        traffic.record.end(self._seq)
        return True


class Traffic:
    """Counts the collectives of one process, and keeps them in its record.

    `blocked_s` is the time in which the host stood still for a collective: all of it on CPU,
    almost nothing on devices that work asynchronously (`DeviceTimes` measures these).
    `sent_bytes` is what a ring sends: 2 (n - 1) / n of the tensor for an all-reduce, (n - 1) / n
    of the full tensor for a reduce-scatter or an all-gather.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.record = record or Record()
        self.blocked_s = 0.0
        self.sent_bytes = 0
        self.n_sends = 0
        self._given: list[torch.Tensor] = []
        self._under_way: list[Started] = []
        self._flights: deque[Interval] = deque(maxlen=_INTERVALS)
        self._stood: deque[Interval] = deque(maxlen=_INTERVALS)
        self._since_s = 0.0

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Time spent inside counts as blocked."""
        self.look()
        start_s = time.perf_counter()
        try:
            yield
        finally:
            end_s = time.perf_counter()
            self.blocked_s += end_s - start_s
            self._stood.append((start_s, end_s))
            self.look()

    def look(self) -> None:
        """Note what has ended of what is under way; asking the backend costs next to nothing."""
        if self._under_way:
            now_s = time.perf_counter()
            over = [each for each in self._under_way if each.is_over]
            self._flights += [(max(each.begun_s, self._since_s), now_s) for each in over]
            self._under_way = [each for each in self._under_way if each not in over]

    def begin(self) -> None:
        """Forget what was hidden up to now, and what sums were given."""
        self.look()
        self._flights.clear()
        self._stood.clear()
        self._given.clear()
        self._since_s = time.perf_counter()

    def hidden_s(self) -> float:
        """Seconds since `begin` in which something was under way and the host not blocked.

        Over host memory, of what was seen to end, which is when something else is exchanged:
        devices are measured by `DeviceTimes`.
        """
        self.look()
        stood = list(self._stood)
        return union_s([*self._flights, *stood]) - union_s(stood)

    def count(self, full_bytes: int, n_ranks: int, passes: int) -> None:
        """Count a ring collective over the full tensor; an all-reduce makes two passes."""
        self.sent_bytes += passes * full_bytes * (n_ranks - 1) // n_ranks

    def note_given(self, gradients: torch.Tensor) -> None:
        """Remember whether what this rank gives to a sum is finite; costs one pass over it."""
        self._given.append(gradients.sum())

    def all_finite(self) -> torch.Tensor | None:
        """Whether all given since the last call was finite, on the device; None: nothing given."""
        given, self._given = self._given, []
        return torch.isfinite(torch.stack(given)).all() if given else None

    def start(
        self,
        op: str,
        tensor: torch.Tensor,
        n_ranks: int,
        call: Callable[[], Any],
        *,
        stands: bool = True,
        alike: bool = True,
    ) -> Started:
        """Begin a collective over that tensor by a call that returns its work.

        Unless it `stands`, a device is not taken to work on it before it is waited for. Unless
        `alike`, others' tensors have another shape.
        """
        self.look()
        seq = self.record.begin(op, tensor if alike else None, n_ranks, stands=stands)
        begun_s = time.perf_counter()
        started = Started(self, seq, call(), begun_s)
        if tensor.device.type == "cpu":
            self._under_way.append(started)
        return started

    def start_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Started:
        """Begin the sum of the tensor over the group, in place."""
        n_ranks = group.size()
        self.count(tensor.nbytes, n_ranks, 2)
        return self.start(
            "all_reduce sum",
            tensor,
            n_ranks,
            lambda: dist.all_reduce(tensor, group=group, async_op=True),
        )

    def all_reduce(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        alike: bool = True,
    ) -> None:
        """Reduce a small tensor in place; unless `alike`, others' tensors have another shape."""
        n_ranks = group.size()
        self.count(tensor.nbytes, n_ranks, 2)
        name = f"all_reduce {'max' if op == dist.ReduceOp.MAX else 'sum'}"
        shown = tensor if alike else None
        with self.record.inside(name, shown, n_ranks, settles=False), self.blocked():
            dist.all_reduce(tensor, op=op, group=group)

    def start_sum(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Begin the sum of a tensor of this group's own shape, in place."""
        self.count(tensor.nbytes, group.size(), 2)
        return self.start(
            "all_reduce sum",
            tensor,
            group.size(),
            lambda: dist.all_reduce(tensor, group=group, async_op=True),
            alike=False,
        )

    def start_reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> dist.Work:
        """Begin what `reduce_scatter` does."""
        self.count(tensor.nbytes, group.size(), 1)
        return self.start(
            "reduce_scatter",
            tensor,
            group.size(),
            lambda: reduce_scatter(output, tensor.flatten(0, 1), group=group, async_op=True),
            alike=False,
        )

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Gather all ranks' tensors into the output [ranks, ...], and wait."""
        n_ranks = group.size()
        self.count(output.nbytes, n_ranks, 1)
        inside = self.record.inside("all_gather", None, n_ranks, settles=False)
        with inside, self.blocked():
            all_gather(output.flatten(0, 1), tensor, group=group)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Sum all ranks' tensors [ranks, ...], keep this rank's row in the output, and wait."""
        n_ranks = group.size()
        self.count(tensor.nbytes, n_ranks, 1)
        inside = self.record.inside("reduce_scatter", None, n_ranks, settles=False)
        with inside, self.blocked():
            reduce_scatter(output, tensor.flatten(0, 1), group=group)

    def sums(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        meanwhile: Callable[[torch.Tensor], None] | None = None,
    ) -> list[float]:
        """The sum of a vector over the group, as numbers; `meanwhile` has it before they are read.

        Devices that work asynchronously have then done all that they were given before.
        """
        self.count(tensor.nbytes, group.size(), 2)
        with self.record.inside("all_reduce sum", tensor, group.size()):
            with self.blocked():
                dist.all_reduce(tensor, group=group)
            if meanwhile is not None:
                meanwhile(tensor)
            values: list[float] = tensor.tolist()
        return values


class TimedAllGather(_fsdp_api.AllGather):
    """FSDP2's all-gather, counted."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor for each call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather all ranks' inputs into the output."""
        traffic, n_ranks = self._traffic, group.size()
        traffic.count(output_tensor.nbytes, n_ranks, 1)

        def call(*, behind: bool) -> Any:
            return all_gather(output_tensor, input_tensor, group=group, async_op=behind)

        if async_op:
            return traffic.start("all_gather", output_tensor, n_ranks, lambda: call(behind=True))
        inside = traffic.record.inside("all_gather", output_tensor, n_ranks, settles=False)
        with inside, traffic.blocked():
            work: dist.Work | None = call(behind=False)
        return work


class TimedReduceScatter(_fsdp_api.ReduceScatter):
    """FSDP2's reduce-scatter, counted; with an all-reduce over replicas behind it, that too.

    `replicas_follow` says whether that comes next.
    """

    def __init__(self, traffic: Traffic, n_replicas: int = 1) -> None:
        self.replicas_follow = n_replicas > 1
        self._traffic = traffic
        self._n_replicas = n_replicas
        self._end_s = 0.0
        self._seq = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A new tensor for each call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum all ranks' inputs and keep this rank's part in the output."""
        traffic, n_ranks = self._traffic, group.size()
        traffic.count(input_tensor.nbytes, n_ranks, 1)
        traffic.note_given(input_tensor)
        inside = traffic.record.inside("reduce_scatter", input_tensor, n_ranks, settles=False)
        with inside, traffic.blocked():
            work: dist.Work | None = reduce_scatter(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        if self.replicas_follow:
            self._seq = traffic.record.begin("all_reduce sum", output_tensor, self._n_replicas)
            traffic.record.wait(self._seq)
        self._end_s = time.perf_counter()
        return work

    def after_all_reduce(self, reduced: torch.Tensor) -> None:
        """Called when FSDP2's all-reduce over replicas, which follows at once, is through."""
        self._traffic.record.end(self._seq)
        self._traffic.count(reduced.nbytes, self._n_replicas, 2)
        self._traffic.blocked_s += time.perf_counter() - self._end_s
