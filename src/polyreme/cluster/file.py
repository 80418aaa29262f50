"""Cluster files (TOML): read with every violation at once, and written.

Amounts are numbers in bytes, seconds and flops, or text with a unit (``"80 GiB"``,
``"400 Gbit/s"``, ``"20 us"``, ``"989 Tflops"``).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, Violation, like
from ..nearby import nearby
from ..units import parse_bytes, parse_bytes_s, parse_flops, parse_seconds
from .presets import PRESETS, preset
from .types import MAX_DEVICES, Cluster, DeviceType, Host, Link

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")
_TOP = ("name", "device_types", "hosts", "intra", "inter")
_TYPE = ("preset", "memory", "peak_flops", "memory_bandwidth", "host_bandwidth", "source")
_HOST = ("name", "device_type", "devices", "count", "memory")
_AMOUNTS: Mapping[Callable[[str, str], float], str] = {
    parse_bytes: '"80 GiB" (or a number of bytes)',
    parse_bytes_s: '"400 Gbit/s" (or a number of bytes per second)',
    parse_flops: '"989 Tflops" (or a number of flops per second)',
    parse_seconds: '"20 us" (or a number of seconds)',
}
_LINK_EXAMPLE = '{bandwidth = "400 Gbit/s", latency = "20 us"}'
_TYPES_EXAMPLE = '{H100 = {preset = "H100"}}'
_LINK = ("latency", "bandwidth", "source")


class _Reader:
    """Reads fields of nested tables and gathers what is wrong with them."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.violations: list[Violation] = []

    def bad(self, path: str, value: Any, rule: str, legal: str) -> None:
        self.violations.append(Violation(path=path, value=value, rule=rule, legal=legal))

    def table(
        self, value: Any, path: str, known: tuple[str, ...] | None, legal: str
    ) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self.bad(path, value, "is no table", legal)
            return {}
        for key in value if known else ():
            if key not in (known or ()):
                close = ", ".join(like(key, known or ()))
                wanted = close or f"leave it out (keys: {', '.join(known or ())})"
                self.bad(f"{path}.{key}", value[key], "is no known key", wanted)
        return value

    def amount(
        self,
        table: Mapping[str, Any],
        key: str,
        path: str,
        parse: Callable[[str, str], float],
        *,
        zero: bool = False,
        default: float | None = None,
    ) -> float | None:
        """A number above 0 (or from 0), or text with a unit; `default` where it is absent."""
        if key not in table:
            return default
        value, where = table[key], f"{path}.{key}"
        number: float | None = None
        if isinstance(value, str):
            try:
                number = parse(value, where)
            except ConfigError as error:
                self.violations.extend(error.violations)
                return None
        elif isinstance(value, int | float) and not isinstance(value, bool):
            number = value
        if number is None or not (0 < number < float("inf") or (zero and number == 0)):
            rule = "is no positive amount" if not zero else "is no amount from 0"
            self.bad(where, value, rule, _AMOUNTS[parse])
            return None
        return number

    def count(self, table: Mapping[str, Any], key: str, path: str, default: int | None) -> int:
        value = table.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.bad(f"{path}.{key}", value, "is no count", "1 (or any integer >= 1)")
            return 1
        return value

    def text(self, table: Mapping[str, Any], key: str, path: str, default: str) -> str:
        value = table.get(key, default)
        if not isinstance(value, str):
            self.bad(f"{path}.{key}", value, "is no text", '"text" (or any text)')
            return default
        return value

    def device_type(self, name: str, value: Any, path: str) -> DeviceType | None:
        table = self.table(value, path, _TYPE, '{preset = "H100"}')
        base: DeviceType | None = None
        if "preset" in table:
            try:
                base = preset(str(table["preset"]), f"{path}.preset").device
            except ConfigError as error:
                self.violations.extend(error.violations)
        memory = self.amount(
            table, "memory", path, parse_bytes, default=base.memory_bytes if base else None
        )
        if "memory" not in table and "preset" not in table:
            self.bad(f"{path}.memory", None, "is missing", '"80 GiB" (or a preset)')
        bandwidth = self.amount(
            table,
            "memory_bandwidth",
            path,
            parse_bytes_s,
            default=base.memory_bandwidth_bytes_s if base else None,
        )
        to_host = self.amount(
            table,
            "host_bandwidth",
            path,
            parse_bytes_s,
            default=base.host_bandwidth_bytes_s if base else None,
        )
        peaks = dict(base.peak_flops) if base else {}
        where = f"{path}.peak_flops"
        legal = '{bf16 = "989 Tflops"}'
        for dtype in self.table(table.get("peak_flops", {}), where, DTYPES, legal):
            peak = self.amount(table["peak_flops"], dtype, where, parse_flops)
            if peak is not None and dtype in DTYPES:
                peaks[dtype] = float(peak)
        source = self.text(table, "source", path, base.source if base else self.source)
        if memory is None:
            return None
        return DeviceType(
            name=name,
            memory_bytes=int(memory),
            peak_flops=peaks,
            memory_bandwidth_bytes_s=bandwidth,
            host_bandwidth_bytes_s=to_host,
            source=source,
        )

    def hosts(self, value: Any, types: Mapping[str, Any], path: str) -> list[Host]:
        if not isinstance(value, list) or not value:
            legal = f"[{_host(types)}] (one [[hosts]] table or more)"
            self.bad(path, value, "is no list of hosts", legal)
            return []
        found: list[Host] = []
        for index, entry in enumerate(value):
            where = f"{path}[{index}]"
            table = self.table(entry, where, _HOST, _host(types))
            kind = self.text(table, "device_type", where, "")
            if kind not in types:
                known = ", ".join(map(_text, types)) or "a key of device_types"
                self.bad(
                    f"{where}.device_type", kind or None, "is no device type of this file", known
                )
            n_devices = self.count(table, "devices", where, None)
            count = self.count(table, "count", where, 1)
            memory = self.amount(table, "memory", where, parse_bytes)
            for copy in range(min(count, 2**16)):
                name = self.text(table, "name", where, f"host-{len(found)}")
                if count > 1 and "name" in table:
                    name = f"{name}-{copy}"
                found.append(
                    Host(
                        name=name,
                        device_type=kind,
                        n_devices=n_devices,
                        memory_bytes=None if memory is None else int(memory),
                    )
                )
        n_devices = sum(host.n_devices for host in found)
        if n_devices > MAX_DEVICES:
            rule = f"are more than {MAX_DEVICES} devices"
            self.bad(path, n_devices, rule, f"[{_host(types)}]")
        names = [host.name for host in found]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.bad(path, name, "names two hosts", "a name of its own for each host")
        return found

    def link(self, data: Mapping[str, Any], key: str, path: str, usual: Link | None) -> Link | None:
        where = f"{path}.{key}"
        if key not in data:
            if usual is None:
                self.bad(where, None, "is missing", _LINK_EXAMPLE)
            return usual
        table = self.table(data[key], where, _LINK, _LINK_EXAMPLE)
        if "bandwidth" not in table:
            self.bad(f"{where}.bandwidth", None, "is missing", '"400 Gbit/s"')
        bandwidth = self.amount(table, "bandwidth", where, parse_bytes_s)
        latency = self.amount(
            table,
            "latency",
            where,
            parse_seconds,
            zero=True,
            default=usual.latency_s if usual else 2e-5,
        )
        source = self.text(table, "source", where, self.source)
        if bandwidth is None or latency is None:
            return None
        return Link(latency_s=latency, bandwidth_bytes_s=bandwidth, source=source)


def read(file: Path, path: str = "cluster") -> Cluster:
    """The cluster of a file; `path` is how violations call the file as a whole.

    Raises:
        ConfigError: the file cannot be read, or every violation in it.
    """
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        rule = f"cannot be read ({error.strerror or error})"
        raise ConfigError([_whole(path, file, rule)]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([_whole(path, file, f"is no TOML: {error}")]) from error
    reader = _Reader(str(file))
    reader.table(data, path, _TOP, _TYPES_EXAMPLE)
    name = reader.text(data, "name", path, file.stem)
    where = f"{path}.device_types"
    declared = reader.table(data.get("device_types", {}), where, None, _TYPES_EXAMPLE)
    if "device_types" not in data or data["device_types"] == {}:
        reader.bad(where, None, "is missing", _TYPES_EXAMPLE)
    types = {
        key: reader.device_type(key, value, f"{path}.device_types.{key}")
        for key, value in declared.items()
    }
    hosts = reader.hosts(data.get("hosts"), declared, f"{path}.hosts")
    usual = _usual_links(declared)
    intra = reader.link(data, "intra", path, usual[0] if usual else None)
    inter = reader.link(data, "inter", path, usual[1] if usual else None)
    if reader.violations:
        raise ConfigError(reader.violations)
    assert intra is not None, "an absent link is a violation"
    assert inter is not None, "an absent link is a violation"
    return Cluster(
        name=name,
        device_types={key: kind for key, kind in types.items() if kind is not None},
        hosts=tuple(hosts),
        intra=intra,
        inter=inter,
    )


def write(cluster: Cluster, file: Path) -> None:
    """Write a cluster so that `read` gives the same one."""
    file.write_text(encode(cluster), encoding="utf-8")


def encode(cluster: Cluster) -> str:
    """A cluster as TOML."""
    lines = [f"name = {_text(cluster.name)}", ""]
    for key, link in (("intra", cluster.intra), ("inter", cluster.inter)):
        lines += [
            f"[{key}]",
            f"latency = {float(link.latency_s)!r}",
            f"bandwidth = {float(link.bandwidth_bytes_s)!r}",
            f"source = {_text(link.source)}",
            "",
        ]
    for key, kind in cluster.device_types.items():
        lines += [f"[device_types.{_text(key)}]", f"memory = {kind.memory_bytes}"]
        if kind.memory_bandwidth_bytes_s is not None:
            lines.append(f"memory_bandwidth = {float(kind.memory_bandwidth_bytes_s)!r}")
        if kind.host_bandwidth_bytes_s is not None:
            lines.append(f"host_bandwidth = {float(kind.host_bandwidth_bytes_s)!r}")
        peaks = ", ".join(f"{dtype} = {float(peak)!r}" for dtype, peak in kind.peak_flops.items())
        lines += [f"peak_flops = {{ {peaks} }}", f"source = {_text(kind.source)}", ""]
    for host in cluster.hosts:
        lines += [
            "[[hosts]]",
            f"name = {_text(host.name)}",
            f"device_type = {_text(host.device_type)}",
            f"devices = {host.n_devices}",
            *([] if host.memory_bytes is None else [f"memory = {host.memory_bytes}"]),
            "",
        ]
    return "\n".join(lines)


def _usual_links(declared: Mapping[str, Any]) -> tuple[Link, Link] | None:
    """Links of the file's only device type, when that is a preset; None otherwise."""
    names = {
        value.get("preset") if isinstance(value, dict) else None for value in declared.values()
    }
    for entry in PRESETS:
        if names == {entry.device.name}:
            return entry.intra, entry.inter
    return None


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _host(types: Mapping[str, Any]) -> str:
    return f"{{device_type = {_text(next(iter(types), 'H100'))}, devices = 8}}"


def _whole(path: str, file: Path, rule: str) -> Violation:
    """A file that is none; others beside it are legal, or none, or on a command line a preset."""
    there = [_text(each) for each in nearby(str(file), _is_cluster)]
    other = "leave it out (or any cluster.toml)"
    if path == "--cluster":
        other = '"preset:8xH100" (or any cluster.toml)'
    legal = ", ".join((*there, other))
    return Violation(path=path, value=str(file), rule=rule, legal=legal)


def _is_cluster(path: Path) -> bool:
    try:
        return path.suffix == ".toml" and "device_types" in tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return False
