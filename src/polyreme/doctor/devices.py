"""Devices of this machine: what they are, whether they work, and how they reach each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..cluster.accelerator import Accelerator, available, unseen
from ..cluster.detect import CPU
from ..cluster.presets import preset, recognise
from ..units import show_bytes, show_flops
from .row import Row

_SIZE = 64  # of the matrices that try a device


def rows() -> Iterator[Row]:
    """Findings about every kind of device that torch or a registration offers."""
    entries = available()
    blind = unseen()
    if blind is not None:
        value, remedy = blind
        yield Row(group="devices", what="accelerator", value=value, status="missing", remedy=remedy)
    for entry in entries:
        yield from _kind(entry)
    yield from (_peers(entry) for entry in entries if not entry.on_host and entry.count() > 1)


def _kind(entry: Accelerator) -> Iterator[Row]:
    count = entry.count()
    for name, version in entry.software().items():
        yield Row(group="devices", what=f"{entry.name} {name}", value=version)
    shown = range(1 if entry.on_host else count)
    for index in shown:
        yield _device(entry, index, count)
    yield _operation(entry)


def _device(entry: Accelerator, index: int, count: int) -> Row:
    name = entry.device_name(index)
    known = preset(CPU) if entry.on_host else recognise(name)
    peaks = known.device.peak_flops if known is not None else {}
    best = max(peaks, key=lambda dtype: peaks[dtype]) if peaks else None
    peak = f"peak {show_flops(peaks[best])}/s ({best})" if best else "peak not known"
    what = entry.name if entry.on_host else f"{entry.name}:{index}"
    number = f"{count} cores, " if entry.on_host else ""
    value = f"{name}: {number}{show_bytes(entry.total_bytes(index))}, {peak}"
    if best or entry.on_host:
        return Row(group="devices", what=what, value=value)
    return Row(
        group="devices",
        what=what,
        value=value,
        status="note",
        remedy="name its peak in a cluster file, or read utilisation against the measured rate",
    )


def _operation(entry: Accelerator) -> Row:
    """A tiny matrix product with a known result, forward and backward, and the backend's name."""
    import torch

    what = f"{entry.name} works"
    try:
        entry.set(0)
        ones = torch.ones(_SIZE, _SIZE, device=entry.device(0), requires_grad=True)
        total = (ones @ ones).sum()
        torch.autograd.backward(total)
        entry.synchronize()
        right = total.item() == _SIZE**3 and ones.grad is not None
        fault = None if right else "a matrix product is wrong"
    except (RuntimeError, AssertionError, OSError) as error:
        fault = " ".join(str(error).split())[:200]
    if fault is None:
        value = f"matrix product and gradient right; collectives: {entry.backend}"
        return Row(group="devices", what=what, value=value)
    remedy = "install a driver and a torch that go together, or hide the device from torch"
    return Row(
        group="devices", what=what, value=fault, status="missing", needed=True, remedy=remedy
    )


def _peers(entry: Accelerator) -> Row:
    pairs = list(itertools.permutations(range(entry.count()), 2))
    found = [entry.reaches(*pair) for pair in pairs]
    what = f"{entry.name} peer access"
    if None in found:
        remedy = "run polyreme profile, which measures the links"
        value = "torch does not say"
        return Row(group="links", what=what, value=value, status="note", remedy=remedy)
    direct = sum(map(bool, found))
    value = f"{direct} of {len(pairs)} pairs"
    if direct == len(pairs):
        return Row(group="links", what=what, value=value)
    remedy = "hide devices that are no peers from torch where collectives take too long"
    return Row(group="links", what=what, value=value, status="note", remedy=remedy)
