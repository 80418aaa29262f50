"""This machine as a cluster; links are the usual ones of its devices until they are measured."""

from __future__ import annotations

import msgspec

from ..errors import ConfigError, Violation
from .accelerator import Accelerator
from .presets import preset, recognise
from .types import Cluster, DeviceType, Host, Link

_MODEL_GIVEN = ", memory as reported"
CPU = "CPU"  # the preset, and the type, of processes in host memory
_UNKNOWN_INTRA = Link(
    latency_s=1e-5, bandwidth_bytes_s=1.6e10, source="assumed: PCIe 3.0 x16, device not known"
)
_UNKNOWN_INTER = Link(
    latency_s=1e-4, bandwidth_bytes_s=1.25e9, source="assumed: 10 Gbit/s, device not known"
)


def detect(accelerator: Accelerator, n_devices: int | None = None, *, n_hosts: int = 1) -> Cluster:
    """`n_devices` of this machine (all of them; for the host, as many processes as cores).

    `n_hosts` alike machines, of which this is one, each give `n_devices`. A device whose name is
    in no preset has no peak.

    Raises:
        ConfigError: this machine has fewer. Processes may outnumber cores.
    """
    there = accelerator.count()
    count = there if n_devices is None else n_devices
    if count < 1 or (count > there and not accelerator.on_host):
        rule = f"is not what this machine has ({there} x {accelerator.name})"
        legal = f"1 to {there}"
        raise ConfigError([Violation(path="cluster.devices", value=count, rule=rule, legal=legal)])
    reported = accelerator.device_name(0)
    entry = preset(CPU) if accelerator.on_host else recognise(reported)
    memory_bytes = min(accelerator.total_bytes(index, count) for index in range(count))
    if entry is None:
        kind = DeviceType(name=reported, memory_bytes=memory_bytes, source="reported by the driver")
        intra, inter = _UNKNOWN_INTRA, _UNKNOWN_INTER
    else:
        kind = msgspec.structs.replace(
            entry.device,
            memory_bytes=memory_bytes,
            source=reported + _MODEL_GIVEN
            if accelerator.on_host
            else f"memory as reported; {entry.device.source}",
        )
        intra, inter = entry.intra, entry.inter
    shape = f"{count}x{kind.name}" if n_hosts == 1 else f"{n_hosts}x{count}x{kind.name}"
    return Cluster(
        name=shape,
        device_types={kind.name: kind},
        hosts=tuple(
            Host(name=f"host-{index}", device_type=kind.name, n_devices=count)
            for index in range(n_hosts)
        ),
        intra=intra,
        inter=inter,
    )


def hardware(cluster: Cluster) -> str:
    """The cluster's devices in one line: ``2 x CPU (AMD EPYC)``, ``16 x H100 on 2 hosts``."""
    counts: dict[str, int] = {}
    for host in cluster.hosts:
        counts[host.device_type] = counts.get(host.device_type, 0) + host.n_devices
    parts = []
    for name, count in counts.items():
        kind = cluster.device_types[name]
        model, known, _ = kind.source.partition(_MODEL_GIVEN)
        parts.append(f"{count} x {kind.name}" + (f" ({model})" if known else ""))
    where = f" on {len(cluster.hosts)} hosts" if len(cluster.hosts) > 1 else ""
    return " + ".join(parts) + where
