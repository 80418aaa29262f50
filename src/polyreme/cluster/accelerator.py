"""What devices can do, whatever they are: the one file that names backends.

Accelerators go through torch's own generic interface, so any backend that torch knows (or that a
plug-in of torch registers) works without a line here. Torch is imported inside functions.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, Violation
from .host_memory import host_bytes, status_bytes, usage_bytes

if TYPE_CHECKING:
    import torch

VARIABLES = (  # what backends read begins so
    "NCCL_",
    "RCCL_",
    "HCCL_",
    "GLOO_",
    "CUDA_",
    "HIP_",
    "ROCR_",
    "ASCEND_",
    "UCX_",
    "FI_",
    "TORCH_",
    "PYTORCH_",
)
_DRIVERS = {"cuda": "/proc/driver/nvidia/version"}
_BUILDS = ("cuda", "hip", "xpu")
_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/davinci0")
_GROWING = ("cuda",)  # whose allocator knows segments that grow
_ALLOCATION = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
HOST_TYPE = "cpu"  # torch's device type for tensors in the memory of the host
HOST_BACKEND = "gloo"
SYSTEM_SHARE = 0.1  # of the host's memory is left to the system


@dataclass(kw_only=True)
class Timer:
    """Seconds that the device worked on what was asked of it inside the `with` block."""

    seconds: float = float("nan")
    marks: Any = ()  # events at both ends, until `settle`

    def settle(self) -> float:
        """Wait for the end of the block, if nobody has yet; its seconds."""
        if self.marks:
            start, end = self.marks
            end.synchronize()
            self.seconds, self.marks = start.elapsed_time(end) / 1e3, ()
        return self.seconds


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device of this machine. Values can be sent to other processes.

    `device_type` is torch's name, `backend` that of its collectives. `memory_limit_bytes` lowers
    what `total_bytes` answers, so plans keep to it; a device whose allocator knows a limit also
    enforces it from `set` on, elsewhere (tensors in host memory) it is not enforced.
    """

    name: str
    device_type: str
    backend: str
    memory_limit_bytes: int | None = None

    @property
    def on_host(self) -> bool:
        """Whether its tensors lie in host memory, which all processes share."""
        return self.device_type == HOST_TYPE

    def count(self) -> int:
        """Devices of this machine; for the host, the cores that this process may use."""
        return int(self._module().device_count())

    def device(self, index: int) -> torch.device:
        """The device of that index."""
        import torch

        return torch.device(self.device_type, index)

    def set(self, index: int) -> None:
        """Make it this process's device, and hold it to the memory limit.

        Unless variables say how its memory is allocated, its allocator grows segments: then a
        tensor takes what it needs, and memory between others' is not lost.
        """
        module = self._module()
        module.set_device(index)
        if self.device_type in _GROWING and not any(name in os.environ for name in _ALLOCATION):
            module.memory._set_allocator_settings("expandable_segments:True")
        if self.memory_limit_bytes is not None:
            share = min(1.0, self.memory_limit_bytes / self._total_bytes(index))
            module.set_per_process_memory_fraction(share, index)

    def synchronize(self) -> None:
        """Wait until the current device is idle."""
        self._module().synchronize()

    def allocated_bytes(self) -> int:
        """Bytes of tensors on the current device now."""
        return int(self._module().memory_allocated())

    def peak_bytes(self) -> int:
        """Most bytes of tensors on the current device since `reset_peak`."""
        return int(self._module().max_memory_allocated())

    def reset_peak(self) -> None:
        """Start `peak_bytes` anew."""
        self._module().reset_peak_memory_stats()

    def held_bytes(self) -> int:
        """Bytes that the current device has lent, tensors apart: contexts, buffers of backends.

        Those of other processes on the same device are among them.
        """
        module = self._module()
        free, total = module.mem_get_info()
        return max(0, int(total - free - module.memory_reserved()))

    def free_bytes(self) -> int:
        """Bytes that the current device can still lend, those cached by torch among them."""
        module = self._module()
        cached = module.memory_reserved() - module.memory_allocated()
        free = module.mem_get_info()[0] + cached
        return int(min(free, self.memory_limit_bytes or free))

    def release(self) -> None:
        """Give back to the device what torch keeps of freed tensors."""
        self._module().empty_cache()

    def total_bytes(self, index: int = 0, sharing: int = 1) -> int:
        """Bytes that a process can have there; `sharing` processes divide the host's memory."""
        total = self._total_bytes(index)
        return min(total, self.memory_limit_bytes or total)

    def device_name(self, index: int = 0) -> str:
        """What the driver calls the device; presets are recognised by it."""
        return str(self._module().get_device_name(index))

    def reaches(self, index: int, other: int) -> bool | None:
        """Whether one device reads another's memory directly; None where torch does not say."""
        asked = getattr(self._module(), "can_device_access_peer", None)
        return None if asked is None else bool(asked(index, other))

    def software(self) -> dict[str, str]:
        """Versions of what torch was built for and of the library of collectives, as known."""
        import torch

        found = {"runtime": getattr(torch.version, self.device_type, None)}
        library: Any = getattr(self._module(), self.backend, None)
        if hasattr(library, "version"):
            found[self.backend] = ".".join(map(str, library.version()))
        found["driver"] = _driver(self.device_type)
        return {name: str(version) for name, version in found.items() if version is not None}

    def has_bf16(self) -> bool:
        """Whether bf16 is the precision to train in where the user leaves it open."""
        supported = getattr(self._module(), "is_bf16_supported", None)
        if supported is None:
            return False
        try:
            return bool(supported(including_emulation=False))
        except TypeError:
            return bool(supported())

    @contextmanager
    def timer(self) -> Iterator[Timer]:
        """Device seconds of the block, known when it ends; waits for the device there."""
        with self.work_timer() as timer:
            yield timer
        timer.settle()

    @contextmanager
    def work_timer(self) -> Iterator[Timer]:
        """Device seconds of the block that other processes have no part in, known once settled."""
        import torch

        timer = Timer()
        start = torch.Event(device=self.device_type, enable_timing=True)
        end = torch.Event(device=self.device_type, enable_timing=True)
        start.record()
        yield timer
        end.record()
        timer.marks = start, end

    @contextmanager
    def full_float32(self) -> Iterator[None]:
        """Products and convolutions of float32 are not rounded to shorter numbers in here."""
        import torch

        convolutions: Any = torch.backends.cudnn
        products, shorter = torch.get_float32_matmul_precision(), convolutions.allow_tf32
        torch.set_float32_matmul_precision("highest")
        convolutions.allow_tf32 = False
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(products)
            convolutions.allow_tf32 = shorter

    def _module(self) -> Any:
        import torch

        return torch.get_device_module(self.device_type)

    def _total_bytes(self, index: int) -> int:
        """As the driver's description of the device says; asking makes no context there."""
        return int(self._module().get_device_properties(index).total_memory)


@dataclass(frozen=True, kw_only=True)
class HostAccelerator(Accelerator):
    """Processes of this machine with tensors in its memory; also what tests build on."""

    name: str = HOST_TYPE
    device_type: str = HOST_TYPE
    backend: str = HOST_BACKEND

    def count(self) -> int:
        """Cores that this process may use."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def device(self, index: int) -> torch.device:
        """Host memory, whatever the index."""
        import torch

        return torch.device(HOST_TYPE)

    def set(self, index: int) -> None:
        """Nothing to choose."""

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def peak_bytes(self) -> int:
        """Most resident bytes of this process since `reset_peak`, the program's own among them."""
        return status_bytes("VmHWM") or usage_bytes()

    def reset_peak(self) -> None:
        """Start `peak_bytes` anew where the system can (Linux); elsewhere it keeps the old peak."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def allocated_bytes(self) -> int:
        """Resident bytes of this process: those of tensors are not told apart."""
        return self.held_bytes()

    def held_bytes(self) -> int:
        """Resident bytes of this process now."""
        return status_bytes("VmRSS") or usage_bytes()

    def free_bytes(self) -> int:
        """Bytes that the machine can still give to all processes together."""
        import psutil

        free = int(psutil.virtual_memory().available)
        return min(free, self.memory_limit_bytes or free)

    def release(self) -> None:
        """Freed tensors of the host are not kept."""

    def total_bytes(self, index: int = 0, sharing: int = 1) -> int:
        """An even share of the host's memory (or the control group's limit), less the system's.

        It does not vary from moment to moment, so what was planned with it stays valid.
        """
        share = int(host_bytes() * (1 - SYSTEM_SHARE)) // sharing
        return min(share, self.memory_limit_bytes or share)

    def device_name(self, index: int = 0) -> str:
        """The processor's model."""
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        except OSError:
            pass
        return platform.processor() or platform.machine()

    def software(self) -> dict[str, str]:
        """None: torch itself computes there."""
        return {}

    def has_bf16(self) -> bool:
        """False: processors seldom gain by it."""
        return False

    @contextmanager
    def timer(self) -> Iterator[Timer]:
        """Wall seconds of the block."""
        timer = Timer()
        start = time.perf_counter()
        yield timer
        timer.seconds = time.perf_counter() - start

    @contextmanager
    def work_timer(self) -> Iterator[Timer]:
        """Processor seconds of this thread: what the block takes with a core to itself."""
        timer = Timer()
        start = time.thread_time()
        yield timer
        timer.seconds = time.thread_time() - start


_registered: list[Accelerator] = []  # of this process; the one place that is open to additions


def register(entry: Accelerator) -> None:
    """Put an accelerator before all others in this process, in place of one of its name."""
    unregister(entry.name)
    _registered.insert(0, entry)


def unregister(name: str) -> None:
    """Take back what `register` put there, if it did."""
    _registered[:] = [entry for entry in _registered if entry.name != name]


def available() -> tuple[Accelerator, ...]:
    """Registered ones, then what torch finds here, the host last; all have a device."""
    import torch
    from torch import distributed

    found = [entry for entry in _registered if entry.count() > 0]
    if torch.accelerator.is_available():
        current = torch.accelerator.current_accelerator()
        assert current is not None, "available, so there is one"
        backend = HOST_BACKEND
        if distributed.is_available():
            backend = distributed.get_default_backend_for_device(current.type)
        found.append(Accelerator(name=current.type, device_type=current.type, backend=backend))
    return (*found, HostAccelerator())


def detect(name: str | None = None) -> Accelerator:
    """The best accelerator here, or the one of that name.

    Raises:
        ConfigError: none of that name; lists those there are.
    """
    entries = available()
    if name is None:
        return entries[0]
    for entry in entries:
        if entry.name == name:
            return entry
    legal = ", ".join(entry.name for entry in entries)
    rule = "is not on this machine"
    raise ConfigError([Violation(path="accelerator", value=name, rule=rule, legal=legal)])


def unseen() -> tuple[str, str] | None:
    """What there is of accelerators that torch does not see, and the remedy; None: nothing."""
    import torch

    if torch.accelerator.is_available():
        return None
    versions = {name: getattr(torch.version, name, None) for name in _BUILDS}
    built = next((f"{name} {version}" for name, version in versions.items() if version), None)
    nodes = [node for node in _NODES if Path(node).exists()]
    if built and nodes:
        return (
            f"{nodes[0]} is there and torch is built for {built}, but sees no device",
            "unset what hides devices (CUDA_VISIBLE_DEVICES), or install a driver for that runtime",
        )
    if nodes:
        return (
            f"{nodes[0]} is there, but torch is built without its backend",
            "install the build of torch for this accelerator",
        )
    return None


def _driver(device_type: str) -> str | None:
    """The version that a driver gives in the system's files, where it does."""
    try:
        text = Path(_DRIVERS.get(device_type, "")).read_text()
    except OSError:
        return None
    match = re.search(r"\b\d+\.\d+(\.\d+)*\b", text)
    return match[0] if match else None
