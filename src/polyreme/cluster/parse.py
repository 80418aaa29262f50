"""Clusters from text: ``preset:8xH100``, ``preset:2x8xH100`` or the path of a cluster file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..errors import ConfigError, Violation, literal, nearest_first
from .presets import PRESETS, preset, uniform
from .types import MAX_DEVICES, Cluster, Host

_SHAPE = re.compile(r"([0-9]+)x(?:([0-9]+)x)?(\S.*)")
_MOST_DIGITS = 18  # what is longer is no number of devices, and slow to read
_PREFIX = "preset:"


def parse(text: str, path: str = "cluster") -> Cluster:
    """The cluster that a command line names: ``preset:SHAPE`` (see `parse_preset`) or a file.

    What is no file and has the form of a shape is taken for one without its prefix.

    Raises:
        ConfigError: every violation, at `path` or at the file's own fields.
    """
    if text.startswith(_PREFIX) or (_SHAPE.fullmatch(text) and not Path(text).exists()):
        return parse_preset(text, path)
    from .file import read

    return read(Path(text), path)


def parse_preset(text: str, path: str = "cluster.preset") -> Cluster:
    """``NxDEVICE`` (hosts filled to the usual number) or ``HxNxDEVICE`` (H hosts of N devices).

    A prefix ``preset:`` is taken as well.

    >>> [host.n_devices for host in parse_preset("16xH100").hosts]
    [8, 8]

    Raises:
        ConfigError: not of this form, or no such device.
    """
    prefix = _PREFIX if text.startswith(_PREFIX) else ""

    def refused(rule: str, shapes: Iterable[str], note: str = "") -> ConfigError:
        legal = ", ".join(literal(prefix + shape) for shape in shapes) + note
        return ConfigError([Violation(path=path, value=text, rule=rule, legal=legal)])

    match = _SHAPE.fullmatch(text.removeprefix(_PREFIX).strip())
    if match is None:
        rule = "is neither NxDEVICE nor HOSTSxNxDEVICE"
        raise refused(rule, ("8xH100", "2x8xH100"))
    counts, device = text.removeprefix(_PREFIX).strip()[: match.start(3)], match[3]
    try:
        entry = preset(device, path)
    except ConfigError:
        names = nearest_first(device, [each.device.name for each in PRESETS])
        raise refused(
            f"names a device that is not known, {literal(device)}",
            (f"{counts}{name}" for name in names),
        ) from None
    note = f" (or any number of devices >= 1 and <= {MAX_DEVICES})"
    numbers = [each.lstrip("0") or "0" for each in match.group(1, 2) if each]
    if any(len(each) > _MOST_DIGITS for each in numbers):
        raise refused("names too many devices", (f"8x{entry.device.name}",), note)
    n_hosts = int(numbers[0]) if match[2] else None
    n_devices = math.prod(map(int, numbers))
    if not 1 <= n_devices <= MAX_DEVICES:
        raise refused(f"names {n_devices} devices", (f"8x{entry.device.name}",), note)
    return uniform(entry, n_devices, n_hosts)


def first(cluster: Cluster, n_devices: int, path: str = "cluster.devices") -> Cluster:
    """The cluster cut down to its first devices.

    Raises:
        ConfigError: there are fewer.
    """
    if n_devices > cluster.n_devices:
        rule = f"is more than {cluster.name} has"
        legal = f"{cluster.n_devices} (or any integer >= 1 and <= {cluster.n_devices})"
        raise ConfigError([Violation(path=path, value=n_devices, rule=rule, legal=legal)])
    if n_devices == cluster.n_devices:
        return cluster
    hosts: list[Host] = []
    left = n_devices
    for host in cluster.hosts:
        if left:
            taken = min(left, host.n_devices)
            hosts.append(msgspec.structs.replace(host, n_devices=taken))
            left -= taken
    used = {host.device_type for host in hosts}
    types = {name: kind for name, kind in cluster.device_types.items() if name in used}
    name = f"{n_devices} of {cluster.name}"
    return msgspec.structs.replace(cluster, name=name, hosts=tuple(hosts), device_types=types)
