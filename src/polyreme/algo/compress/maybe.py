"""A packet, or nothing: what a worker sends that may be silent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..packet import Buffer, Like, Message, Packet, from_bytes, to_bytes
from .kind import CompressorKind

if TYPE_CHECKING:
    import torch


class Maybe(CompressorKind, frozen=True, kw_only=True, tag="Maybe", tag_field="kind"):
    """The bytes of another compressor's packet, or none, which decode to zero.

    Four bytes say how many there are. Syncs make such packets (`something`, `nothing`); it is no
    choice of a configuration. Source: no paper; the form of lazy workers' packets.

    Attributes:
        inner: Whose packet it is.
        per: Says nothing here.
        dense_below: Says nothing here.
    """

    inner: CompressorKind

    def form(self, like: Like) -> tuple[Buffer, ...]:
        """Bytes."""
        return (Buffer("uint8", None),)

    def decode(self, buffers: tuple[torch.Tensor, ...], like: Like) -> torch.Tensor:
        """What the packet says; zero if there is none."""
        import torch

        (data,) = buffers
        if not data.numel():
            return torch.zeros(like.shape, dtype=getattr(torch, like.dtype), device=data.device)
        return from_bytes(data, ((self.inner, like),)).packets[0].decode()


def something(packet: Packet) -> Packet:
    """The packet, where it might have been none."""
    data = to_bytes(Message(packets=(packet,)))
    return Packet(buffers=(data,), like=packet.like, kind=Maybe(inner=packet.kind))


def nothing(kind: CompressorKind, like: Like, device: torch.device) -> Packet:
    """No packet, where that compressor might have made one."""
    import torch

    data = torch.zeros(0, dtype=torch.uint8, device=device)
    return Packet(buffers=(data,), like=like, kind=Maybe(inner=kind))


def none(packet: Packet) -> Packet:
    """No packet in the place of this one."""
    return nothing(packet.kind, packet.like, packet.buffers[0].device)


def holds(message: Message) -> bool:
    """Whether any of the message's packets, which might all have been none, is one."""
    return any(packet.buffers[0].numel() for packet in message.packets)
