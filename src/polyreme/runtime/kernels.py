"""What runs on a device, and when, by torch's profiler."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from ..cluster.accelerator import Accelerator

_RANGES = ("Optimizer.", "ProfilerStep", "## ")


class Kernel(NamedTuple):
    """A kernel or a copy, with when it began and ended, in seconds of one clock."""

    name: str
    start_s: float
    end_s: float


class Recorder:
    """Records what this process's device runs, once; the host's part is not recorded.

    Hosts of CUDA devices would stay slower at asking for kernels once a profiler had run, by half
    and more (pytorch issue 144455): here it is taken out again when it is done, unless
    TEARDOWN_CUPTI in the environment says otherwise.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
        activities: Any = supported_activities  # known to all devices, typed for none
        on_device = activities() - {ProfilerActivity.CPU}
        self._profiler: Any = profile(activities=on_device, acc_events=True)  # False warns

    def start(self) -> None:
        """From here on, when all that was asked for before is done."""
        self._accelerator.synchronize()
        self._profiler.start()

    def stop(self) -> list[Kernel]:
        """All since, when it is done."""
        self._accelerator.synchronize()
        self._profiler.stop()
        # `events` of the profiler itself would make objects of a tree: seconds, for a long step.
        return [
            Kernel(event.name(), 1e-9 * event.start_ns(), 1e-9 * event.end_ns())
            for event in self._profiler.profiler.kineto_results.events()
            if event.device_type() != DeviceType.CPU and not event.name().startswith(_RANGES)
        ]
