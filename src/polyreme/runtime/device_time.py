"""Where a step's time goes on a device that works behind the host's back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ..cluster.accelerator import Accelerator
from .kernels import Recorder
from .timing import StepTimes, union_s

FIRST = 12
"""Steps of a process before the first that is profiled: short runs are not kept waiting for it."""

# A profiled step takes seconds more than others, and says the same as its neighbours: the next
# comes after so many steps, then after twice as many.
_AFTER, _MOST = 500, 8000


class DeviceTimes:
    """Splits steps by shares that a profiled step of this process had, until the next of these.

    Compute is the time in which any kernel ran that is not a collective's, communication that in
    which only collectives ran, waiting the rest. A collective's kernel also spins while its peers
    are late, so some waiting counts as communication. Nothing is synchronised but the few steps
    that are profiled. Before the first of them all is compute.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._n_steps, self._next, self._after = 0, FIRST, _AFTER
        self._compute, self._comm, self._hidden = 1.0, 0.0, 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around each step; profiles a few."""
        number = self._n_steps
        self._n_steps += 1
        if number < self._next:
            yield
            return
        self._next, self._after = number + self._after, min(2 * self._after, _MOST)
        recorder = Recorder(self._accelerator)
        recorder.start()
        try:
            yield
        finally:
            kernels = recorder.stop()
        self._compute, self._comm, self._hidden = shares(kernels, self._accelerator.backend)

    def split(self, step_s: float) -> StepTimes:
        """A step of that length by the last shares."""
        compute_s, comm_s = step_s * self._compute, step_s * self._comm
        return StepTimes(
            step_s=step_s,
            compute_s=compute_s,
            comm_s=comm_s,
            wait_s=step_s - compute_s - comm_s,
            hidden_s=step_s * self._hidden,
        )


def shares(kernels: Iterable[tuple[str, float, float]], backend: str) -> tuple[float, float, float]:
    """Shares of computing, of communicating alone, and beside computing, first start to last end.

    A kernel (name, start, end) is a collective's if its name has the backend's in it.

    >>> shares([("gemm", 0, 4), ("xcclAllReduce", 3, 6), ("adam", 8, 10)], "xccl")
    (0.6, 0.2, 0.1)
    """
    kernels = list(kernels)
    if not kernels:
        return 1.0, 0.0, 0.0
    comm = [(start, end) for name, start, end in kernels if backend in name.lower()]
    compute = [(start, end) for name, start, end in kernels if backend not in name.lower()]
    whole = max(end for _, _, end in kernels) - min(start for _, start, _ in kernels)
    busy = union_s(compute)
    alone = union_s([*comm, *compute]) - busy
    hidden = union_s(comm) - alone
    return (busy / whole, alone / whole, hidden / whole) if whole else (1.0, 0.0, 0.0)
