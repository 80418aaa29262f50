"""Known devices: dense peaks, memory and the links they usually come with, each with its source.

A figure that no source gives is absent. "80 GB" of a datasheet is read as 80e9 bytes, so a plan
made from a preset never counts on memory that the driver keeps; a device that is there says itself
how much it has. To its host's memory it has PCIe, of the generation in its datasheet. Start-up
seconds of links are in no datasheet: they are assumed, and say so.
"""

from __future__ import annotations

import re

import msgspec

from ..errors import ConfigError, Violation
from .types import Cluster, DeviceType, Host, Link

_H100 = "NVIDIA H100 Tensor Core GPU architecture whitepaper (2022), dense"
_HOPPER_SHEET = "datasheet, tensor rates halved (printed with sparsity)"
_A100 = "NVIDIA A100 Tensor Core GPU datasheet (2021), dense"
_V100 = "NVIDIA Tesla V100 GPU datasheet (2018)"


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A device, what torch calls it, and how such devices are usually joined.

    `reported` are the exact device names that drivers report; a name that is not here (another
    form factor, a slice of a card) is an unknown device. `per_host` is how many a usual machine
    holds (None: as many as are asked for).
    """

    device: DeviceType
    reported: tuple[str, ...]
    per_host: int | None
    intra: Link
    inter: Link


def _intra(bandwidth_bytes_s: float, source: str) -> Link:
    return Link(
        latency_s=5e-6, bandwidth_bytes_s=bandwidth_bytes_s, source=f"{source}; latency assumed"
    )


def _inter(bandwidth_bytes_s: float, source: str) -> Link:
    return Link(
        latency_s=2e-5, bandwidth_bytes_s=bandwidth_bytes_s, source=f"{source}; latency assumed"
    )


_NVLINK4 = _intra(450e9, "NVLink 4: 900 GB/s both ways, NVIDIA H100 datasheet")
_NVLINK3 = _intra(300e9, "NVLink 3: 600 GB/s both ways, NVIDIA A100 datasheet")
_NVLINK2 = _intra(150e9, "NVLink 2: 300 GB/s both ways, NVIDIA Tesla V100 datasheet")
_PCIE5 = _intra(64e9, "PCIe 5.0 x16: 128 GB/s both ways, NVIDIA H100 datasheet")
_PCIE4 = _intra(32e9, "PCIe 4.0 x16: 64 GB/s both ways, NVIDIA A100 datasheet")
_PCIE3 = _intra(16e9, "PCIe 3.0 x16: 32 GB/s both ways, NVIDIA Tesla V100 datasheet")
_NDR = _inter(50e9, "one 400 Gbit/s InfiniBand port a GPU, NVIDIA DGX H100 datasheet")
_HDR = _inter(25e9, "one 200 Gbit/s InfiniBand port a GPU, NVIDIA DGX A100 datasheet")
_EDR = _inter(6.25e9, "four 100 Gbit/s InfiniBand ports for 8 GPUs, NVIDIA DGX-1 datasheet")
_DCU = "Li, High-Quality-and-Efficiency Distributed Machine Learning, lecture slides, 2026"

PRESETS: tuple[Preset, ...] = (
    Preset(
        device=DeviceType(
            name="H100",
            memory_bytes=80 * 10**9,
            peak_flops={
                "fp64": 66.9e12,
                "fp32": 66.9e12,
                "tf32": 494.7e12,
                "bf16": 989.4e12,
                "fp16": 989.4e12,
            },
            memory_bandwidth_bytes_s=3.35e12,
            host_bandwidth_bytes_s=_PCIE5.bandwidth_bytes_s,
            source=f"SXM5, 80 GB: {_H100}; bandwidth: NVIDIA H100 datasheet",
        ),
        reported=("NVIDIA H100 80GB HBM3",),
        per_host=8,
        intra=_NVLINK4,
        inter=_NDR,
    ),
    Preset(
        device=DeviceType(
            name="H100-PCIe",
            memory_bytes=80 * 10**9,
            peak_flops={
                "fp64": 51.2e12,
                "fp32": 51.2e12,
                "tf32": 378e12,
                "bf16": 756e12,
                "fp16": 756e12,
            },
            memory_bandwidth_bytes_s=2e12,
            host_bandwidth_bytes_s=_PCIE5.bandwidth_bytes_s,
            source=f"PCIe, 80 GB: {_H100}",
        ),
        reported=("NVIDIA H100 PCIe",),
        per_host=8,
        intra=_PCIE5,
        inter=_NDR,
    ),
    Preset(
        device=DeviceType(
            name="H100-NVL",
            memory_bytes=94 * 10**9,
            peak_flops={
                "fp64": 60e12,
                "fp32": 60e12,
                "tf32": 417.5e12,
                "bf16": 835.5e12,
                "fp16": 835.5e12,
            },
            memory_bandwidth_bytes_s=3.9e12,
            host_bandwidth_bytes_s=_PCIE5.bandwidth_bytes_s,
            source=f"NVL, 94 GB, one card: NVIDIA H100 {_HOPPER_SHEET}",
        ),
        reported=("NVIDIA H100 NVL",),
        per_host=8,
        intra=_PCIE5,
        inter=_NDR,
    ),
    Preset(
        device=DeviceType(
            name="H200",
            memory_bytes=141 * 10**9,
            peak_flops={
                "fp64": 67e12,
                "fp32": 67e12,
                "tf32": 494.5e12,
                "bf16": 989.5e12,
                "fp16": 989.5e12,
            },
            memory_bandwidth_bytes_s=4.8e12,
            host_bandwidth_bytes_s=_PCIE5.bandwidth_bytes_s,
            source=f"SXM, 141 GB: NVIDIA H200 {_HOPPER_SHEET}",
        ),
        reported=("NVIDIA H200",),
        per_host=8,
        intra=_NVLINK4,
        inter=_NDR,
    ),
    Preset(
        device=DeviceType(
            name="H200-NVL",
            memory_bytes=141 * 10**9,
            peak_flops={
                "fp64": 60e12,
                "fp32": 60e12,
                "tf32": 417.5e12,
                "bf16": 835.5e12,
                "fp16": 835.5e12,
            },
            memory_bandwidth_bytes_s=4.8e12,
            host_bandwidth_bytes_s=_PCIE5.bandwidth_bytes_s,
            source=f"NVL, 141 GB: NVIDIA H200 {_HOPPER_SHEET}",
        ),
        reported=("NVIDIA H200 NVL",),
        per_host=8,
        intra=_PCIE5,
        inter=_NDR,
    ),
    Preset(
        device=DeviceType(
            name="A100",
            memory_bytes=80 * 10**9,
            peak_flops={
                "fp64": 19.5e12,
                "fp32": 19.5e12,
                "tf32": 156e12,
                "bf16": 312e12,
                "fp16": 312e12,
            },
            memory_bandwidth_bytes_s=2.039e12,
            host_bandwidth_bytes_s=_PCIE4.bandwidth_bytes_s,
            source=f"SXM4, 80 GB: {_A100}",
        ),
        reported=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        per_host=8,
        intra=_NVLINK3,
        inter=_HDR,
    ),
    Preset(
        device=DeviceType(
            name="A100-40GB",
            memory_bytes=40 * 10**9,
            peak_flops={
                "fp64": 19.5e12,
                "fp32": 19.5e12,
                "tf32": 156e12,
                "bf16": 312e12,
                "fp16": 312e12,
            },
            memory_bandwidth_bytes_s=1.555e12,
            host_bandwidth_bytes_s=_PCIE4.bandwidth_bytes_s,
            source=f"SXM4, 40 GB: {_A100}",
        ),
        reported=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        per_host=8,
        intra=_NVLINK3,
        inter=_HDR,
    ),
    Preset(
        device=DeviceType(
            name="A100-PCIe",
            memory_bytes=80 * 10**9,
            peak_flops={
                "fp64": 19.5e12,
                "fp32": 19.5e12,
                "tf32": 156e12,
                "bf16": 312e12,
                "fp16": 312e12,
            },
            memory_bandwidth_bytes_s=1.935e12,
            host_bandwidth_bytes_s=_PCIE4.bandwidth_bytes_s,
            source=f"PCIe, 80 GB: {_A100}",
        ),
        reported=("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        per_host=8,
        intra=_PCIE4,
        inter=_HDR,
    ),
    Preset(
        device=DeviceType(
            name="A100-PCIe-40GB",
            memory_bytes=40 * 10**9,
            peak_flops={
                "fp64": 19.5e12,
                "fp32": 19.5e12,
                "tf32": 156e12,
                "bf16": 312e12,
                "fp16": 312e12,
            },
            memory_bandwidth_bytes_s=1.555e12,
            host_bandwidth_bytes_s=_PCIE4.bandwidth_bytes_s,
            source=f"PCIe, 40 GB: {_A100}",
        ),
        reported=("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
        per_host=8,
        intra=_PCIE4,
        inter=_HDR,
    ),
    Preset(
        device=DeviceType(
            name="V100",
            memory_bytes=32 * 10**9,
            peak_flops={"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12},
            memory_bandwidth_bytes_s=900e9,
            host_bandwidth_bytes_s=_PCIE3.bandwidth_bytes_s,
            source=f"SXM2, 32 GB: {_V100}",
        ),
        reported=("Tesla V100-SXM2-32GB",),
        per_host=8,
        intra=_NVLINK2,
        inter=_EDR,
    ),
    Preset(
        device=DeviceType(
            name="V100-16GB",
            memory_bytes=16 * 10**9,
            peak_flops={"fp64": 7.8e12, "fp32": 15.7e12, "fp16": 125e12},
            memory_bandwidth_bytes_s=900e9,
            host_bandwidth_bytes_s=_PCIE3.bandwidth_bytes_s,
            source=f"SXM2, 16 GB: {_V100}",
        ),
        reported=("Tesla V100-SXM2-16GB",),
        per_host=8,
        intra=_NVLINK2,
        inter=_EDR,
    ),
    Preset(
        device=DeviceType(
            name="V100-PCIe",
            memory_bytes=32 * 10**9,
            peak_flops={"fp64": 7e12, "fp32": 14e12, "fp16": 112e12},
            memory_bandwidth_bytes_s=900e9,
            host_bandwidth_bytes_s=_PCIE3.bandwidth_bytes_s,
            source=f"PCIe, 32 GB: {_V100}",
        ),
        reported=("Tesla V100-PCIE-32GB",),
        per_host=8,
        intra=_PCIE3,
        inter=_EDR,
    ),
    Preset(
        device=DeviceType(
            name="Titan-Xp",
            memory_bytes=12 * 10**9,
            peak_flops={"fp32": 12.15e12},
            memory_bandwidth_bytes_s=547.7e9,
            host_bandwidth_bytes_s=_PCIE3.bandwidth_bytes_s,
            source="NVIDIA TITAN Xp product page: 3840 cores at 1582 MHz, 547.7 GB/s",
        ),
        reported=("NVIDIA TITAN Xp", "TITAN Xp"),
        per_host=4,
        intra=_intra(16e9, "PCIe 3.0 x16: 32 GB/s both ways, PCI-SIG"),
        inter=_inter(1.25e9 / 4, "assumed: 10 Gbit/s Ethernet shared by 4 GPUs"),
    ),
    Preset(
        device=DeviceType(
            name="Ascend-910A",
            memory_bytes=32 * 10**9,
            peak_flops={"fp16": 256e12},
            memory_bandwidth_bytes_s=1.2e12,
            source="Huawei, Ascend 910 at Hot Chips 31 (2019): 256 Tflops fp16, 1.2 TB/s; 32 GB",
        ),
        reported=("Ascend910A",),
        per_host=8,
        intra=_intra(90e9, "three HCCS links of 240 Gbit/s, Hot Chips 31"),
        inter=_inter(12.5e9, "one 100 Gbit/s port a device, Huawei Atlas 900 (2019)"),
    ),
    Preset(
        device=DeviceType(
            name="DCU-BW1000",
            memory_bytes=64 * 10**9,
            peak_flops={"bf16": 480e12},
            source=f"{_DCU}: 64 GB, 480 Tflops bf16",
        ),
        reported=("BW1000", "DCU BW1000"),
        per_host=8,
        intra=_intra(100e9, f"about 100 GB/s inside a node: {_DCU}"),
        inter=_inter(10e9, f"about 10 GB/s between nodes: {_DCU}"),
    ),
    Preset(
        device=DeviceType(
            name="CPU",
            memory_bytes=4 * 2**30,
            source="assumed: 4 GiB a process; processors differ too much for a peak",
        ),
        reported=(),
        per_host=None,
        intra=Link(latency_s=5e-5, bandwidth_bytes_s=2e9, source="assumed: copies through memory"),
        inter=Link(latency_s=1e-4, bandwidth_bytes_s=1.25e8, source="assumed: 1 Gbit/s Ethernet"),
    ),
)


def preset(name: str, path: str = "cluster.preset") -> Preset:
    """The preset of that name; case, spaces, dashes and underscores do not matter.

    >>> preset("titan xp").device.name
    'Titan-Xp'

    Raises:
        ConfigError: no such preset; lists them, at `path`.
    """
    for entry in PRESETS:
        if _plain(entry.device.name) == _plain(name):
            return entry
    known = ", ".join(entry.device.name for entry in PRESETS)
    raise ConfigError([Violation(path=path, value=name, rule="is no known device", legal=known)])


def recognise(reported: str) -> Preset | None:
    """The preset of a device name as the driver reports it; None for a device not known.

    >>> recognise("NVIDIA H200").device.peak_flops["bf16"]
    989500000000000.0
    """
    for entry in PRESETS:
        if any(_plain(name) == _plain(reported) for name in entry.reported):
            return entry
    return None


def uniform(entry: Preset, n_devices: int, n_hosts: int | None = None) -> Cluster:
    """A cluster of one device type; hosts are filled to the usual number unless `n_hosts` is given.

    `n_devices` counts all hosts; with `n_hosts` it must divide evenly.
    """
    per_host = entry.per_host or n_devices
    if n_hosts is not None:
        assert n_devices % n_hosts == 0, "hosts of one cluster text are alike"
        per_host = n_devices // n_hosts
    sizes = [per_host] * (n_devices // per_host)
    if n_devices % per_host:
        sizes.append(n_devices % per_host)
    name = entry.device.name
    shape = f"{len(sizes)}x{sizes[0]}x{name}" if len(sizes) > 1 else f"{n_devices}x{name}"
    if len(set(sizes)) > 1:
        shape = f"{n_devices}x{name}"
    return Cluster(
        name=shape,
        device_types={name: entry.device},
        hosts=tuple(
            Host(name=f"host-{index}", device_type=name, n_devices=size)
            for index, size in enumerate(sizes)
        ),
        intra=entry.intra,
        inter=entry.inter,
    )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
