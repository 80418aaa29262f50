"""Times between and beyond what a profile holds.

Microbatches and sizes: straight lines between measured points, the last slope beyond them. A point
above a larger size's is lowered to it: more work takes no less time, and noise only adds. Group
sizes: the ring formula from the
nearest measured one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from .record import Collective, CollectiveTimes, HostSeconds, Profile

_ROUNDS: Mapping[Collective, int] = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "send": 0,
}


class Curve:
    """Seconds against a size: monotone, never negative, 0 at 0."""

    def __init__(self, sizes: Sequence[float], seconds: Sequence[float]) -> None:
        assert len(sizes) == len(seconds) > 0, "a curve has a point"
        assert all(low < high for low, high in pairwise(sizes)), "sorted"
        self._sizes = list(sizes)
        self._seconds = _lowered(seconds)
        self._slope = self._last_slope()

    def __call__(self, size: float) -> float:
        """Seconds at a size.

        >>> Curve((1, 2, 4), (1.0, 2.0, 3.0))(3), Curve((1, 2), (1.0, 1.5))(4)
        (2.5, 2.5)
        """
        sizes, seconds = self._sizes, self._seconds
        if size <= 0:
            return 0.0
        if size >= sizes[-1]:
            return seconds[-1] + self._slope * (size - sizes[-1])
        if size <= sizes[0]:
            return seconds[0]
        right = bisect.bisect_right(sizes, size)
        left = right - 1
        share = (size - sizes[left]) / (sizes[right] - sizes[left])
        return seconds[left] + share * (seconds[right] - seconds[left])

    def of_part(self, size: float) -> float:
        """Seconds below the first point too: on the line through the first two, or in proportion.

        What does not shrink with the size, such as the start of kernels, stays.

        >>> Curve((1, 2), (4.0, 8.0)).of_part(0.25), Curve((1, 2), (4.0, 4.0)).of_part(0.25)
        (1.0, 4.0)
        """
        first, first_s = self._sizes[0], self._seconds[0]
        if size >= first:
            return self(size)
        rise = self._slope
        if len(self._sizes) > 1:
            rise = (self._seconds[1] - first_s) / (self._sizes[1] - first)
        return max(first_s - rise * (first - size), first_s * size / first)

    @property
    def least_s(self) -> float:
        """Seconds of the smallest measured size: the start-up cost and little else."""
        return self._seconds[0]

    def _last_slope(self) -> float:
        """Of the last two points; from the origin where those are one, or level by noise."""
        if len(self._sizes) > 1:
            rise = self._seconds[-1] - self._seconds[-2]
            if rise > 0:
                return rise / (self._sizes[-1] - self._sizes[-2])
        return self._seconds[-1] / self._sizes[-1]


class Asked(NamedTuple):
    """Seconds of passes on a device, and those that its host takes to ask for them.

    Those of layers that follow one another add up: the host asks for the next while the device
    works.
    """

    forward: float
    backward: float
    host_forward: float = 0.0
    host_backward: float = 0.0

    def plus(self, other: Asked, count: int = 1) -> Asked:
        """With so many others behind it."""
        return Asked(*(mine + count * its for mine, its in zip(self, other, strict=True)))

    @property
    def lasting(self) -> tuple[float, float]:
        """Forward and backward seconds until both are through: whoever is slower says how long.

        >>> Asked(1.0, 2.0, 0.5, 1.0).lasting, Asked(1.0, 2.0, 3.0, 3.0).lasting
        ((1.0, 2.0), (2.5, 3.5))
        """
        host_s = self.host_forward + self.host_backward
        late_s = host_s - self.forward - self.backward
        if late_s <= 0:
            return self.forward, self.backward
        share = self.host_forward / host_s
        return self.forward + late_s * share, self.backward + late_s * (1 - share)


def _lowered(seconds: Sequence[float]) -> list[float]:
    """The largest rising sequence that is nowhere above the measured one."""
    return list(accumulate((max(0.0, value) for value in reversed(seconds)), min))[::-1]


class Fit:
    """Fitted costs of a profile; remembers nothing but the curves."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._forward = {
            kind: Curve(times.microbatch, times.forward_s) for kind, times in profile.layers.items()
        }
        self._backward = {
            kind: Curve(times.microbatch, times.backward_s)
            for kind, times in profile.layers.items()
        }
        self._parts = {
            (kind, tp): (
                Curve(times.microbatch, times.forward_s),
                Curve(times.microbatch, times.backward_s),
            )
            for kind, layer in profile.layers.items()
            for tp, times in layer.parts.items()
        }
        self._collectives = {
            op: [(entry, Curve(entry.size_bytes, entry.seconds)) for entry in entries]
            for op, entries in profile.collectives.items()
        }
        self._nearest: dict[tuple[Collective, int, int | None], tuple[CollectiveTimes, Curve]] = {}

    def forward_s(self, kind: str, microbatch: float) -> float:
        """Seconds of a layer kind's forward pass over so many samples, or a part of one."""
        return self._forward[kind].of_part(microbatch)

    def backward_s(self, kind: str, microbatch: float) -> float:
        """Seconds of its backward pass, recomputation apart."""
        return self._backward[kind].of_part(microbatch)

    def passes_s(self, kind: str, microbatch: float, tp: int = 1) -> tuple[float, float]:
        """Both of one of `tp` tensor parts: as measured, or as of so many samples fewer."""
        found = self._parts.get((kind, tp))
        if found is not None:
            forward, backward = found
            return forward.of_part(microbatch), backward.of_part(microbatch)
        return self.forward_s(kind, microbatch / tp), self.backward_s(kind, microbatch / tp)

    def asked(self, kind: str, microbatch: float, tp: int = 1, *, recompute: bool = False) -> Asked:
        """Both, and what the host takes to ask for them; recomputing counts as backward."""
        forward_s, backward_s = self.passes_s(kind, microbatch, tp)
        times = self.profile.layers[kind]
        of_parts = times.parts.get(tp, times)
        host = of_parts.host_s or HostSeconds(forward=0.0, backward=0.0)
        if not recompute:
            return Asked(forward_s, backward_s, host.forward, host.backward)
        backward_s += forward_s * times.recomputed(microbatch)
        return Asked(forward_s, backward_s, host.forward, host.backward + host.recompute)

    def send_s(self, pp: int, size_bytes: float, n_hosts: int) -> float:
        """Seconds from one of `pp` pipeline ranks to the next.

        As measured, or else what gathering twice its bytes over two devices takes.
        """
        if self.profile.collectives.get("send"):
            return self.collective_s("send", pp, size_bytes, n_hosts)
        return self.collective_s("all_gather", 2, 2 * size_bytes, n_hosts)

    def all_to_all_s(self, n_devices: int, size_bytes: float, n_hosts: int | None = None) -> float:
        """Seconds in which each device deals out `size_bytes` to all, itself included.

        As measured, or else what a gather takes in which each gets as many bytes.
        """
        known = self.profile.collectives.get("all_to_all")
        return self.collective_s(
            "all_to_all" if known else "all_gather", n_devices, size_bytes, n_hosts
        )

    def collective_s(
        self, op: Collective, n_devices: int, size_bytes: float, n_hosts: int | None = None
    ) -> float:
        """Seconds of a collective whose full tensor has `size_bytes`; 0 for a lone device.

        `n_hosts` is over how many hosts the group spreads; None: as few as the profile knows for
        its size. KeyError if the profile holds no group at all for it.
        """
        if n_devices <= 1 or size_bytes <= 0:
            return 0.0
        key = op, n_devices, n_hosts
        if key not in self._nearest:
            entries = self._collectives[op]
            if not entries:
                raise KeyError(op)
            self._nearest[key] = min(
                entries, key=lambda pair: _distance(pair[0], n_devices, n_hosts)
            )
        entry, curve = self._nearest[key]
        if entry.n_devices == n_devices or op == "send":
            return curve(size_bytes)
        start_s = curve.least_s
        moved_s = curve(size_bytes) - start_s
        return start_s * _steps(op, n_devices) / _steps(op, entry.n_devices) + moved_s * (
            _share(n_devices) / _share(entry.n_devices)
        )


def _distance(entry: CollectiveTimes, n_devices: int, n_hosts: int | None) -> tuple[float, ...]:
    """The same number of hosts first (if stated), then the nearest size, then the larger group."""
    return (
        abs(math.log(entry.n_hosts / n_hosts)) if n_hosts else 0.0,
        abs(math.log(entry.n_devices / n_devices)),
        -entry.n_devices,
        entry.n_hosts,
    )


def _steps(op: Collective, n_devices: int) -> int:
    """Messages one after another in a ring; each pays the start-up seconds."""
    return _ROUNDS[op] * (n_devices - 1)


def _share(n_devices: int) -> float:
    """Part of the full tensor that a ring moves over each link, in each round."""
    return (n_devices - 1) / n_devices


def ring_s(
    op: Collective, n_devices: int, size_bytes: float, latency_s: float, bandwidth_bytes_s: float
) -> float:
    """Seconds of a ring collective. Source: Patarasuk and Yuan 2009, section 3.

    >>> ring_s("all_reduce", 4, 4e9, 0.0, 1e9)
    6.0
    """
    moved_s = _ROUNDS[op] * _share(n_devices) * size_bytes / bandwidth_bytes_s
    return _steps(op, n_devices) * latency_s + moved_s
