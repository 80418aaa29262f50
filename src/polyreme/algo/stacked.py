"""Tensors to packets and back: small ones alike as rows of one, quicker than one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .packet import Like, Packet

if TYPE_CHECKING:
    import torch

    from .compress.kind import CompressorKind
    from .draw import Draw

State = dict[str, Any]

SMALL = 1 << 16
"""Entries up to which tensors are small: of larger ones copies cost more than calls."""


def encoded(
    kinds: Sequence[tuple[CompressorKind, Like]],
    xs: Sequence[torch.Tensor],
    states: Sequence[State],
    draws: Sequence[Draw],
) -> tuple[list[Packet], list[State]]:
    """A packet of each tensor, given as a vector, and its compressor's next state.

    What a compressor of rows says that they decode to is kept with the packets.
    """
    import torch

    found: dict[int, Packet] = {}
    after = list(states)
    for group in _groups(kinds):
        kind, like = kinds[group[0]]
        if not kind.stacks:
            (i,) = group
            buffers, after[i] = kind.encode(xs[i].view(like.shape), states[i], draws[i])
            found[i] = Packet(buffers=buffers, like=like, kind=kind)
            continue
        rows = torch.stack([xs[i] for i in group]) if len(group) > 1 else xs[group[0]].unsqueeze(0)
        columns, seen = kind.encode_rows(rows, [draws[i] for i in group])
        each = zip(*(column.unbind() for column in columns), strict=True)
        shown = seen.view(len(group), *like.shape).unbind()
        for i, buffers, x in zip(group, each, shown, strict=True):
            found[i] = Packet(buffers=buffers, like=like, kind=kind)
            found[i].keep(x)
    return [found[i] for i in range(len(kinds))], after


def decoded(packets: Sequence[Packet]) -> list[torch.Tensor]:
    """What each decodes to, which it keeps."""
    left = [packet for packet in packets if not packet.is_decoded]
    for packet, x in zip(left, _each(left, lambda kind: kind.decode), strict=True):
        packet.keep(x)
    return [packet.decode() for packet in packets]


def kept(packets: Sequence[Packet]) -> list[torch.Tensor]:
    """Which entries each holds; of sparse ones alone."""
    return _each(packets, lambda kind: kind.kept)


def _each(packets: Sequence[Packet], method: Callable[[Any], Any]) -> list[torch.Tensor]:
    import torch

    found: dict[int, torch.Tensor] = {}
    for group in _groups([(packet.kind, packet.like) for packet in packets]):
        first = packets[group[0]]
        if len(group) > 1:
            columns = zip(*(packets[i].buffers for i in group), strict=True)
            rows = method(first.kind)(tuple(map(torch.stack, columns)), first.like)
            found |= zip(group, rows.unbind(), strict=True)
        else:
            found[group[0]] = method(first.kind)(first.buffers, first.like)
    return [found[i] for i in range(len(packets))]


def _groups(kinds: Sequence[tuple[Any, Any]]) -> list[list[int]]:
    """Which go together, in the order of the first of each."""
    groups: dict[Any, list[int]] = {}
    for i, what in enumerate(kinds):
        kind, like = what
        together = kind.stacks and like.n_entries <= SMALL
        groups.setdefault(what if together else i, []).append(i)
    return list(groups.values())
