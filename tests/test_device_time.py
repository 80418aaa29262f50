"""When steps are profiled, and what is recorded then."""

from __future__ import annotations

import pytest
import torch

from behind import Behind
from polyreme.cluster.accelerator import detect
from polyreme.runtime import device_time
from polyreme.runtime.device_time import DeviceTimes
from polyreme.runtime.kernels import Kernel, Recorder


class _Recorder:
    """Says of every step that its first half was spent on sums."""

    n = 0

    def __init__(self, accelerator) -> None:
        pass

    def start(self) -> None:
        type(self).n += 1

    def stop(self) -> list[Kernel]:
        return [Kernel("gloo_sum", 0.0, 1.0), Kernel("product", 1.0, 2.0)]


def test_profiled_steps_come_more_and_more_seldom(monkeypatch) -> None:
    """Each takes seconds more than others: over a long run that adds up."""
    _Recorder.n = 0
    monkeypatch.setattr(device_time, "Recorder", _Recorder)
    times, profiled = DeviceTimes(Behind()), []
    for number in range(24_000):
        before = _Recorder.n
        with times.step():
            pass
        if _Recorder.n > before:
            profiled.append(number)
    assert profiled == [12, 512, 1512, 3512, 7512, 15512, 23512]


def test_steps_are_split_as_the_last_profiled_one_was(monkeypatch) -> None:
    monkeypatch.setattr(device_time, "Recorder", _Recorder)
    monkeypatch.setattr(device_time, "FIRST", 1)
    times = DeviceTimes(Behind())
    with times.step():
        pass
    assert times.split(4.0).compute_s == 4.0
    with times.step():
        pass
    split = times.split(4.0)
    assert (split.compute_s, split.comm_s, split.wait_s) == (2.0, 2.0, 0.0)


@pytest.mark.skipif(detect().on_host, reason="needs an accelerator")
def test_a_recording_holds_each_kernel_and_no_call_of_the_host() -> None:
    accelerator = detect()
    x = torch.zeros(1000, device=accelerator.device(0))
    recorder = Recorder(accelerator)
    recorder.start()
    for _ in range(5):
        x.add_(1)
    found = recorder.stop()
    assert len(found) == 5
    assert all(each.start_s <= each.end_s for each in found)
    assert [each.start_s for each in found] == sorted(each.start_s for each in found)
