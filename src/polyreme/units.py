"""Bytes, seconds and flops: parsing what people write and printing what people read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

from .errors import ConfigError, Violation

_BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTES = _BINARY | _DECIMAL | {"KB": 10**3}
_SECONDS: dict[str, Decimal | int] = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": 1,
    "min": 60,
    "h": 3600,
    "d": 86400,
}
_FLOPS = {"flops": 1} | {
    f"{prefix}flops": 10**power
    for prefix, power in {"k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18, "Z": 21}.items()
}
_BITS_S = {"bit/s": 1, "kbit/s": 10**3, "Mbit/s": 10**6, "Gbit/s": 10**9, "Tbit/s": 10**12}
_BYTES_S = {f"{unit}/s": factor for unit, factor in _BYTES.items()} | {
    unit: Decimal(factor) / 8 for unit, factor in _BITS_S.items()
}
_NUMBER = r"[0-9](?:[0-9_]*[0-9])?(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_MOST_DIGITS = 6
_PART = re.compile(rf"\s*({_NUMBER})\s*([^\s0-9.]*)")


def parse_bytes(text: str, path: str = "") -> int:
    """Bytes of ``24 GiB``, ``80 GB`` or ``512``; a fraction of a byte is cut off.

    `path` names the field in the ConfigError raised for anything else.

    >>> parse_bytes("1.5 KiB")
    1536
    """
    return int(_parse(text, _BYTES, "B", path, "24 GiB"))


def parse_seconds(text: str, path: str = "") -> float:
    """Seconds of ``1.5 ms`` or ``2 min 5 s``. Raises ConfigError naming `path`."""
    return float(_parse(text, _SECONDS, "s", path, "1.5 ms"))


def parse_flops(text: str, path: str = "") -> float:
    """Flops (or flops per second) of ``989 Tflops``. Raises ConfigError naming `path`."""
    return float(_parse(text, _FLOPS, "flops", path, "989 Tflops"))


def parse_bytes_s(text: str, path: str = "") -> float:
    """Bytes per second of ``450 GB/s`` or ``100 Gbit/s``. Raises ConfigError naming `path`."""
    return float(_parse(text, _BYTES_S, "B/s", path, "450 GB/s"))


def show_bytes(n_bytes: float, digits: int = 3) -> str:
    """Three digits, or so many, and a binary unit.

    >>> show_bytes(25769803776)
    '24 GiB'
    """
    return _show(n_bytes, _BINARY, digits)


def show_seconds(seconds: float, digits: int = 3) -> str:
    """Three digits and a unit, or minutes and hours in two parts; of more digits seconds alone.

    >>> show_seconds(0.0015), show_seconds(125), show_seconds(125.25, 5)
    ('1.5 ms', '2 min 5 s', '125.25 s')
    """
    if not math.isfinite(seconds) or abs(seconds) < 59.95 or digits > 3:
        return _show(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}, digits)
    sign = "-" if seconds < 0 else ""
    whole = round(abs(seconds))
    if whole >= 3600:
        whole = round(whole / 60) * 60
    for large, small in (("d", "h"), ("h", "min"), ("min", "s")):
        if whole >= _SECONDS[large] or large == "min":
            step = int(_SECONDS[small])
            rounded = round(whole / step) * step
            count, rest = divmod(rounded, int(_SECONDS[large]))
            tail = f" {rest // step} {small}" if rest else ""
            return f"{sign}{count} {large}{tail}"
    raise AssertionError("the last pair always returns")


def show_flops(flops: float) -> str:
    """Three digits and a decimal unit.

    >>> show_flops(9.89e14)
    '989 Tflops'
    """
    return _show(flops, _FLOPS)


def show_bytes_s(bytes_s: float) -> str:
    """Three digits and a decimal unit, bytes per second.

    >>> show_bytes_s(4.5e11)
    '450 GB/s'
    """
    return _show(bytes_s, {f"{unit}/s": factor for unit, factor in _DECIMAL.items()})


def apart(values: Sequence[float], show: Callable[[float, int], str]) -> list[str]:
    """Each as `show_bytes` or `show_seconds` has it, in as many digits as tell it from the others.

    Six at most: those that differ by less have three and look equal.

    >>> apart([2.922, 2.9242, 3.5], show_seconds)
    ['2.922 s', '2.924 s', '3.5 s']
    """
    shown = [[show(value, digits) for value in values] for digits in range(3, _MOST_DIGITS + 1)]
    return [
        next(
            (
                texts[at]
                for texts in shown
                if all(
                    texts[at] != text
                    for text, other in zip(texts, values, strict=True)
                    if other != value
                )
            ),
            shown[0][at],
        )
        for at, value in enumerate(values)
    ]


def count(n: int, noun: str, plural: str | None = None) -> str:
    """A number of things.

    >>> count(1, "device"), count(4096, "device")
    ('1 device', '4,096 devices')
    """
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def _parse(
    text: str, units: Mapping[str, Decimal | int], bare: str, path: str, example: str
) -> Decimal:
    total = Decimal(0)
    position = 0
    parts = 0
    stripped = text.strip()
    while position < len(stripped):
        match = _PART.match(stripped, position)
        if match is None:
            break
        number, unit = match.groups()
        if not unit and parts == 0 and match.end() == len(stripped):
            unit = bare
        if unit not in units:
            break
        try:
            total += Decimal(number) * units[unit]
        except InvalidOperation:
            break
        position = match.end()
        parts += 1
    if not parts or position < len(stripped):
        rule = "is not a number with a unit"
        legal = f'"{example}" (units: {", ".join(units)})'
        raise ConfigError([Violation(path=path, value=text, rule=rule, legal=legal)])
    return total


def _show(value: float, units: Mapping[str, Decimal | float], digits: int = 3) -> str:
    ordered = sorted(units.items(), key=lambda item: item[1])
    whole = next(index for index, (_, factor) in enumerate(ordered) if factor == 1)
    if not math.isfinite(value):
        return f"{value} {ordered[whole][0]}"
    largest = len(ordered) - 1
    index = next((i for i in range(largest, 0, -1) if abs(value) >= ordered[i][1]), 0)
    if value == 0:
        index = whole
    number = _digits(value / float(ordered[index][1]), digits)
    if index < largest and abs(float(number)) * float(ordered[index][1]) >= ordered[index + 1][1]:
        index += 1
        number = _digits(value / float(ordered[index][1]), digits)
    return f"{number} {ordered[index][0]}"


def _digits(value: float, digits: int) -> str:
    if abs(value) >= 1e6:
        return f"{value:.{digits}g}"
    shown = f"{value:.{max(0, digits - len(str(int(abs(value)))))}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
