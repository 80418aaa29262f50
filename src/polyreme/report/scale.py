"""From values to places in a drawing, and round values to mark there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SIZES = {"TiB": 2.0**40, "GiB": 2.0**30, "MiB": 2.0**20, "KiB": 2.0**10, "B": 1.0}


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """Values from `low` to `high` on pixels from `start` to `end`, by their logarithms if `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.start + (at - low) / (high - low) * (self.end - self.start)


def around(values: Sequence[float], start: float, end: float) -> Scale:
    """A scale with some room beyond the values; logarithmic where they differ by much."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 8:
        return Scale(low=low / 1.3, high=high * 1.3, start=start, end=end, log=True)
    room = (high - low) * 0.12 or abs(high) * 0.05 or 1.0
    return Scale(low=max(0.0, low - room), high=high + room, start=start, end=end)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round values between two, at most so many and at least two where that can be.

    >>> ticks(0.0, 1.0, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = (high - low) / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Ones, twos and fives between two values."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{each}e{power}") for power in powers for each in (1, 2, 5)]
    return [each for each in found if low <= each <= high]


Marks = tuple[str, list[tuple[float, str]]]  # a unit, and (value, what is written there)


def _marks(scale: Scale, units: Mapping[str, float], most: int, largest: float) -> Marks:
    """Round values of a scale in the unit that suits the largest."""
    unit, size = _unit(units, largest)
    low, high = scale.low / size, scale.high / size
    found = log_ticks(low, high) if scale.log else ticks(low, high, most)
    return unit, [(each * size, f"{each:.12g}") for each in found]


def time_marks(scale: Scale, most: int, largest_s: float | None = None) -> Marks:
    """Round seconds of a scale, in the unit that suits the largest (without: of the scale)."""
    return _marks(scale, _TIMES, most, largest_s or scale.high)


def size_marks(scale: Scale, most: int) -> Marks:
    """Round bytes of a scale."""
    return _marks(scale, _SIZES, most, scale.high)


def _unit(units: Mapping[str, float], value: float) -> tuple[str, float]:
    """The largest unit of which the value is one or more; else the least."""
    return next((each for each in units.items() if value >= each[1]), list(units.items())[-1])
