"""Accelerators: one file names backends; the host, unknown cards and registered ones."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

import polyreme
from polyreme.cluster import accelerator as accelerators
from polyreme.cluster.accelerator import (
    Accelerator,
    HostAccelerator,
    available,
    register,
    unregister,
)
from polyreme.cluster.detect import detect, hardware
from polyreme.errors import ConfigError

SOURCE = Path(polyreme.__file__).parent
# Not "cpu": that is where host memory is, and rooms that may not import this one need to say so.
BACKENDS = {"cuda", "nccl", "npu", "hccl", "xpu", "xccl", "ccl", "mps", "hip", "gloo", "mpi"}


class ToyAccelerator(HostAccelerator):
    """Three devices of a make of its own; tensors lie in host memory."""

    def count(self) -> int:
        return 3

    def device_name(self, index: int = 0) -> str:
        return "Toy 3000"


@pytest.fixture
def toy():
    entry = ToyAccelerator(name="toy", memory_limit_bytes=50_000_000)
    register(entry)
    yield entry
    unregister("toy")


def test_backend_names_stand_in_one_file_alone() -> None:
    found = []
    for path in SOURCE.rglob("*.py"):
        if path == SOURCE / "cluster" / "accelerator.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ""
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.partition(":")[0]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = node.attr if node.value.id == "torch" else ""
            if name in BACKENDS:
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {name}")
    assert not found


def test_the_host_is_the_last_resort() -> None:
    assert isinstance(available()[-1], HostAccelerator)
    if not torch.accelerator.is_available():
        assert isinstance(accelerators.detect(), HostAccelerator)


def test_a_registered_accelerator_comes_first_and_its_limit_shows_in_the_cluster(toy) -> None:
    assert accelerators.detect() is toy
    assert accelerators.detect("toy") is toy
    cluster = detect(toy, 2)
    assert cluster.type_of(0).memory_bytes == 50_000_000
    unregister("toy")
    assert accelerators.detect() is not toy


def test_an_accelerator_that_is_not_here_is_a_violation() -> None:
    with pytest.raises(ConfigError) as caught:
        accelerators.detect("abacus")
    assert "abacus" in str(caught.value)
    assert HostAccelerator().name in caught.value.violations[0].legal


class UnknownCard(Accelerator):
    """A device that no preset knows."""

    def count(self) -> int:
        return 2

    def device_name(self, index: int = 0) -> str:
        return "Card 9"

    def total_bytes(self, index: int = 0, sharing: int = 1) -> int:
        return (8 - index) * 10**9


def test_an_unknown_device_has_no_peak_and_a_stated_link() -> None:
    card = UnknownCard(name="card", device_type="card", backend="none")
    cluster = detect(card)
    assert cluster.type_of(0).peak_flops == {}
    assert cluster.type_of(0).memory_bytes == 7 * 10**9  # the smallest of them
    assert "assumed" in cluster.intra.source
    assert hardware(cluster) == "2 x Card 9"
    with pytest.raises(ConfigError):
        detect(card, 3)


def test_processes_share_the_memory_of_the_host() -> None:
    host = HostAccelerator()
    one, four = host.total_bytes(0, 1), host.total_bytes(0, 4)
    assert 4 * four <= one <= 4 * four + 4
    assert host.total_bytes(0, 4) == four  # the same each time, or plans would go stale
    assert detect(host, 7).n_devices == 7  # more than there may be cores


def test_the_peak_sees_memory_that_is_gone_and_can_start_anew() -> None:
    host = HostAccelerator()
    host.reset_peak()
    before = host.peak_bytes()
    block = torch.ones(2**26, dtype=torch.uint8)
    del block
    assert host.peak_bytes() >= before + 2**25
    if sys.platform == "linux":
        high = host.peak_bytes()
        host.reset_peak()
        assert host.peak_bytes() < high


def test_a_timer_measures_its_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [5.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    host = HostAccelerator()
    with host.timer() as timer:
        assert timer.seconds != timer.seconds
        now_s[0] += 2.5
    now_s[0] += 1
    assert timer.seconds == 2.5


def test_float32_is_not_shortened_inside_and_as_before_outside():
    torch.set_float32_matmul_precision("high")
    try:
        with HostAccelerator().full_float32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")


class Driven:
    """What torch has for a make of devices, noting what is set."""

    def __init__(self) -> None:
        self.memory, self.said = self, []

    def set_device(self, index: int) -> None:
        self.said.append(index)

    def _set_allocator_settings(self, words: str) -> None:
        self.said.append(words)


@pytest.mark.parametrize(
    ("kind", "variable", "said"),
    [
        ("cuda", None, [1, "expandable_segments:True"]),
        ("cuda", "PYTORCH_ALLOC_CONF", [1]),
        ("cuda", "PYTORCH_CUDA_ALLOC_CONF", [1]),
        ("xpu", None, [1]),
    ],
)
def test_segments_of_a_device_grow_unless_a_variable_says_how(
    monkeypatch, kind, variable, said
) -> None:
    """A weight of 25 MiB took 26, and memory between tensors could not be used."""
    driven = Driven()
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:512")
    monkeypatch.setattr(Accelerator, "_module", lambda _: driven)
    Accelerator(name=kind, device_type=kind, backend="any").set(1)
    assert driven.said == said
