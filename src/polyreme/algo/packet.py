"""What travels between workers: buffers, whose bytes are the bytes on the wire."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from .once import once

if TYPE_CHECKING:
    import torch

    from .compress.kind import CompressorKind


class Like(NamedTuple):
    """Shape and type of a tensor, such as ((3, 4), "float32")."""

    shape: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(tensor: torch.Tensor) -> Like:
        """Those of a tensor."""
        return Like(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    @property
    def n_entries(self) -> int:
        """Entries of such a tensor."""
        return math.prod(self.shape)


class Buffer(NamedTuple):
    """Type and length of one buffer of a packet; no length where it varies."""

    dtype: str
    length: int | None


@dataclass(frozen=True, kw_only=True)
class Packet:
    """One compressed tensor: buffers of one dimension, in the order of its compressor's form.

    It is decoded once, however often it is asked: nobody changes what it gives.
    """

    buffers: tuple[torch.Tensor, ...]
    like: Like
    kind: CompressorKind

    @once
    def nbytes(self) -> int:
        """Bytes on the wire: buffers, and 4 for each length that the receiver cannot know."""
        held = sum(buffer.nbytes for buffer in self.buffers)
        return held + 4 * sum(form.length is None for form in self.kind.form(self.like))

    def decode(self) -> torch.Tensor:
        """The tensor that the receiver sees."""
        return self._decoded

    @property
    def is_decoded(self) -> bool:
        """Whether it was decoded before."""
        return "_decoded" in self.__dict__

    def keep(self, decoded: torch.Tensor) -> None:
        """Keep what it decodes to, found by its compressor."""
        self.__dict__["_decoded"] = decoded

    @once
    def _decoded(self) -> torch.Tensor:
        return self.kind.decode(self.buffers, self.like)


def added(packets: Sequence[Packet]) -> Packet:
    """The packet of the sum, of packets whose compressor `adds`."""
    first = packets[0]
    assert all(packet.kind.adds for packet in packets), "packets of this compressor do not add"
    columns = zip(*(packet.buffers for packet in packets), strict=True)
    buffers = [
        sum(each[1:], each[0]) if each[0].is_floating_point() else each[0] for each in columns
    ]
    return Packet(buffers=tuple(buffers), like=first.like, kind=first.kind)


Kinds = tuple[tuple["CompressorKind", Like], ...]
"""Compressor and tensor of each packet of a message: what a receiver must know to read it."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Packets sent as one."""

    packets: tuple[Packet, ...]

    @once
    def kinds(self) -> Kinds:
        """What its receiver must know."""
        return tuple((packet.kind, packet.like) for packet in self.packets)

    @once
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(packet.nbytes for packet in self.packets)


def total(messages: Sequence[Message]) -> Message:
    """The sum of messages whose packets add, in their order."""
    columns = zip(*(message.packets for message in messages), strict=True)
    return Message(packets=tuple(added(packets) for packets in columns))


def applied(function: Callable[[Sequence[Message]], Any], messages: Sequence[Message]) -> Any:
    """A function of the messages of all workers, which gives the same on all of them.

    Where workers of one process hold the very same packets it is called once. What it gave is kept
    with the first packet, as long as that lives, for functions that do the same: of the same code,
    with equal values of what they use from outside.
    """
    packets = [packet for message in messages for packet in message.packets]
    if not packets:
        return function(messages)
    first, *others = packets
    what = [len(message.packets) for message in messages], others
    held = first.__dict__.get("_applied")
    if held is not None and _same(held[0], what) and _alike(held[1], function):
        return held[2]
    result = function(messages)
    first.__dict__["_applied"] = what, function, result
    return result


_Held = tuple[Sequence[int], Sequence[Packet]]
"""Packets of each message, and all of them but the first."""


def _same(some: _Held, others: _Held) -> bool:
    return some[0] == others[0] and all(map(is_, some[1], others[1]))


def _alike(one: Any, other: Any) -> bool:
    """Whether two functions do the same, or two values are equal, as far as can be told."""
    import torch

    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, FunctionType):
        return one.__code__ is other.__code__ and _alike(_outside(one), _outside(other))
    if isinstance(one, MethodType):
        return _alike((one.__func__, one.__self__), (other.__func__, other.__self__))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return bool(one == other)


def _outside(function: FunctionType) -> tuple[Any, ...]:
    """What a function uses beside its arguments."""
    cells = function.__closure__ or ()
    kept = tuple(cell.cell_contents for cell in cells)
    return kept, function.__defaults__, function.__kwdefaults__


def to_bytes(message: Message) -> torch.Tensor:
    """The message as it travels: a uint8 tensor of `nbytes` entries."""
    import torch

    parts = [torch.zeros(0, dtype=torch.uint8)]
    for packet in message.packets:
        forms = packet.kind.form(packet.like)
        for buffer, form in zip(packet.buffers, forms, strict=True):
            if form.length is None:
                count = torch.tensor([buffer.numel()], dtype=torch.int32, device=buffer.device)
                parts.append(count.view(torch.uint8))
            assert form.length in (None, buffer.numel()), "a buffer is as long as its form says"
            parts.append(buffer.contiguous().view(torch.uint8))
    return torch.cat([part.to(parts[-1].device) for part in parts])


def from_bytes(data: torch.Tensor, kinds: Kinds) -> Message:
    """The message in these bytes, whose packets are of these compressors and tensors."""
    import torch

    packets, at = [], 0

    def take(n_bytes: int) -> torch.Tensor:
        nonlocal at
        at += n_bytes
        # Views of other types want aligned memory, so each buffer is copied out.
        return data[at - n_bytes : at].clone()

    for kind, like in kinds:
        buffers = []
        for name, length in kind.form(like):
            dtype = getattr(torch, name)
            count = int(take(4).view(torch.int32)) if length is None else length
            buffers.append(take(count * dtype.itemsize).view(dtype))
        packets.append(Packet(buffers=tuple(buffers), like=like, kind=kind))
    assert at == data.numel(), "a message is read to its end"
    return Message(packets=tuple(packets))
