"""Memory of a plan's devices by cause beside what they have; equal devices together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..plan.grid import Degrees, Grid, Rows
from ..plan.ir import MEMORY_CAUSES
from ..plan.step import Step
from ..units import apart, count, show_bytes
from .facts import Share
from .words import clipped, percent, runs_of, size

MOST_BARS = 16
WORTH_DRAWING = 4  # a capacity beyond so many times the use would squeeze the parts


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that need and have the same."""

    label: str
    devices: str
    need_bytes: int
    have_bytes: int
    device_type: str
    causes: tuple[Share, ...]

    @property
    def amounts(self) -> tuple[str, str]:
        """What they need and have, in digits that tell these apart."""
        need, have = apart((self.need_bytes, self.have_bytes), show_bytes)
        return need, have

    @property
    def left(self) -> str:
        """``20.6 GiB free``, or how much is missing."""
        left = self.have_bytes - self.need_bytes
        return f"{size(abs(left))} {'free' if left >= 0 else 'missing'}"

    @property
    def said(self) -> str:
        """``59.4 GiB of 80 GiB (74 %)``."""
        share = percent(self.need_bytes / self.have_bytes) if self.have_bytes else "all"
        return f"{' of '.join(self.amounts)} ({share})"


class Bars(msgspec.Struct, frozen=True, kw_only=True):
    """All bars stage by stage, or the fullest and the others; `scale` is the bytes of a whole row.

    `note` says what the scale is where it is no capacity.
    """

    shown: tuple[Bar, ...]
    folded: tuple[Bar, ...]
    names: tuple[str, ...]
    scale: int
    note: str


def memory_bars(step: Step) -> Bars:
    """A bar for devices that are equal in need and capacity."""
    bars = _bars(step)
    most, have = max(bar.need_bytes for bar in bars), max(bar.have_bytes for bar in bars)
    scale, note = max(most, have), ""
    if have > WORTH_DRAWING * most:
        scale = most
        note = f"a whole row is the {size(most)} of the fullest, of the {size(have)} that it has"
    shown = bars
    if len(bars) > MOST_BARS:
        fullest = sorted(bars, key=lambda bar: bar.need_bytes - bar.have_bytes)[-MOST_BARS:]
        shown = tuple(bar for bar in bars if any(bar is each for each in fullest))
    folded = tuple(bar for bar in bars if not any(bar is each for each in shown))
    used = {share.name for bar in bars for share in bar.causes}
    names = [*(name for name in MEMORY_CAUSES if name in used), *sorted(used - {*MEMORY_CAUSES})]
    return Bars(shown=shown, folded=folded, names=tuple(names), scale=max(1, scale), note=note)


def _bars(step: Step) -> tuple[Bar, ...]:
    rows, estimate = step.rows, step.estimate
    degrees = rows.degrees if isinstance(rows, Grid) else Degrees()
    place_of = {device: place for place, device in enumerate(sorted(rows.devices))}
    have = estimate.capacities
    groups: dict[tuple[tuple[tuple[str, int], ...], int, str], list[tuple[int, int, int]]] = {}
    for pipe, row in enumerate(rows.pipes):
        for index, device in enumerate(row):
            at = place_of[device]
            causes = tuple(estimate.memory[at].items())
            key = (causes, have[at].n_bytes, have[at].device_type)
            shard = index // (degrees.tp * degrees.cp) % degrees.shard
            groups.setdefault(key, []).append((pipe, shard, device))
    return tuple(
        Bar(
            label=_label(rows, degrees.shard, places),
            devices=_devices([device for _, _, device in places]),
            need_bytes=sum(amount for _, amount in causes),
            have_bytes=have_bytes,
            device_type=device_type,
            causes=_shares(causes),
        )
        for (causes, have_bytes, device_type), places in groups.items()
    )


def _shares(causes: Sequence[tuple[str, int]]) -> tuple[Share, ...]:
    whole = max(1, sum(amount for _, amount in causes))
    return tuple(
        Share(name=name, amount=amount, share=amount / whole) for name, amount in causes if amount
    )


def _label(rows: Rows, n_shards: int, places: Sequence[tuple[int, int, int]]) -> str:
    """Stages and shards of devices, as far as they tell them from others."""
    pipes = dict.fromkeys(pipe for pipe, _, _ in places)
    shards = sorted({shard for _, shard, _ in places})
    parts = []
    if rows.pp > 1:
        stages = sorted({stage for pipe in pipes for stage in rows.stages_of(pipe)})
        parts.append(_named("stage", stages))
    if len(shards) < n_shards:
        parts.append(_named("shard", shards))
    if not parts:
        return count(len(rows.devices), "device")
    return ", ".join(parts)


def _devices(devices: Sequence[int]) -> str:
    text = _named("device", sorted(devices))
    short = clipped(text, 26)
    return text if short == text else f"{short} ({count(len(devices), 'device')})"


def _named(what: str, numbers: Sequence[int]) -> str:
    plural = "s" if len(numbers) > 1 else ""
    return f"{what}{plural} {runs_of([str(number) for number in numbers])}"
