"""Devices, links and hosts: what there is to run on."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MAX_DEVICES = 2**20  # of a cluster; more is taken for a mistake


class DeviceType(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of device. `peak_flops` is the *dense* peak by dtype name; an empty map: unknown.

    `memory_bytes` is what a process can have, `host_bandwidth_bytes_s` what it moves to its host's
    memory in one direction; `source` says where the figures come from.
    """

    name: str
    memory_bytes: int
    peak_flops: Mapping[str, float] = {}
    memory_bandwidth_bytes_s: float | None = None
    host_bandwidth_bytes_s: float | None = None
    source: str


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A link as one device sees it: start-up seconds and bytes per second in one direction."""

    latency_s: float
    bandwidth_bytes_s: float
    source: str


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of one machine: so many of one type (a key of `Cluster.device_types`).

    `memory_bytes` is what its processes can have together beside their devices (unset: unknown).
    """

    name: str
    device_type: str
    n_devices: int
    memory_bytes: int | None = None


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts and the links inside and between them.

    Devices are numbered host by host: device 0 is the first of the first host.
    """

    name: str
    device_types: Mapping[str, DeviceType]
    hosts: tuple[Host, ...]
    intra: Link
    inter: Link

    @property
    def n_devices(self) -> int:
        """Devices of all hosts."""
        return sum(host.n_devices for host in self.hosts)

    def host_of(self, device: int) -> Host:
        """The host of a device index; IndexError beyond the last."""
        first = device
        for host in self.hosts:
            if first < host.n_devices:
                return host
            first -= host.n_devices
        raise IndexError(device)

    def type_of(self, device: int) -> DeviceType:
        """The type of a device index."""
        return self.device_types[self.host_of(device).device_type]
