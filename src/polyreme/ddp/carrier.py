"""Carries out what an exchange asks for, over a process group of the user's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..algo.effects import Combine, Program, Received, Recv, Send, Sum, SumShards, Suspect
from ..algo.packet import Kinds, Message, from_bytes, to_bytes
from ..algo.topology.passing import refilled, vector
from ..algo.worker import Worker
from ..cluster.accelerator import HOST_BACKEND

HOST = torch.device("cpu")


class Carrier:
    """Plays programs over a process group; all workers call `play` together.

    `nbytes` counts what this worker gave.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.nbytes = 0
        self._group = group
        self._post: Any = None
        self._device = torch.device("cpu")

    def play(self, program: Program[Any], me: Worker, device: torch.device) -> Any:
        """What a program returns; messages are on that device."""
        self._device = device
        answer: Any = None
        sending: list[tuple[Any, torch.Tensor]] = []
        while True:
            try:
                effect: Any = program.send(answer)
            except StopIteration as end:
                for work, _ in sending:  # buffers live until they are sent
                    work.wait()
                return end.value
            match effect:
                case Sum():
                    answer = self._summed(effect.message)
                case Combine():
                    answer = effect.function(self._gather(effect.message, me))
                case Send():
                    sending += self._send(effect)
                    answer = None
                case Recv():
                    answer = self._receive(effect, me)
                case SumShards():
                    answer = effect.partial
                case Suspect():
                    answer = None
                case _:
                    raise AssertionError(f"an exchange does not ask for {effect}")

    def _summed(self, message: Message) -> Message:
        """By the backend's own all-reduce: the same bits on all workers, in whatever order."""
        total = vector(message)
        for part in total:
            self.nbytes += part.numel() * part.element_size()
            dist.all_reduce(part, group=self._group)
        return refilled(message, total)

    def _gather(self, message: Message, me: Worker) -> list[Message]:
        """What each worker gives, by rank."""
        data = to_bytes(message)
        sizes = [data.numel()] * me.n
        if _varies(message.kinds):
            sizes = self._all(torch.tensor([data.numel()], device=data.device), me).tolist()
        padded = torch.nn.functional.pad(data, (0, max(sizes) - data.numel()))
        rows = self._all(padded, me).view(me.n, -1)
        self.nbytes += data.numel()
        return [
            from_bytes(row[:size], message.kinds) for row, size in zip(rows, sizes, strict=True)
        ]

    def _all(self, own: torch.Tensor, me: Worker) -> torch.Tensor:
        """The tensors of all workers, one after another."""
        rows = own.new_empty(me.n * own.numel())
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(rows, own, group=self._group)  # torch 2.13 renamed it
        return rows

    def _send(self, effect: Send) -> list[tuple[Any, torch.Tensor]]:
        data = to_bytes(effect.message)
        self.nbytes += data.numel()
        parts = [data]
        if _varies(effect.message.kinds):
            parts.insert(0, torch.tensor([data.numel()]))
        to, post = self._global(effect.to), self._posted()
        given = [each.to(HOST) for each in parts if each.numel()]
        return [(dist.isend(each, to, group=post), each) for each in given]

    def _receive(self, effect: Recv, me: Worker) -> Received:
        source, post = self._global(effect.source), self._posted()
        size = torch.tensor([_size(effect.kinds)], device=HOST)
        if _varies(effect.kinds):
            dist.recv(size, source, group=post)
        data = torch.empty(int(size), dtype=torch.uint8, device=HOST)
        if data.numel():
            dist.recv(data, source, group=post)
        return Received(
            source=effect.source, message=from_bytes(data.to(self._device), effect.kinds)
        )

    def _posted(self) -> Any:
        """What messages from one to another go over; all workers ask for it together.

        It is over host memory: on accelerators two that send to each other before they receive
        would wait for ever.
        """
        if self._post is None:
            self._post = self._group
            if self._device.type != "cpu":
                self._post = dist.new_group(
                    dist.get_process_group_ranks(self._group),
                    backend=HOST_BACKEND,
                    use_local_synchronization=True,
                )
        return self._post

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)


def _varies(kinds: Kinds) -> bool:
    """Whether the size of such a message is not known before."""
    return any(form.length is None for kind, like in kinds for form in kind.form(like))


def _size(kinds: Kinds) -> int:
    forms = [form for kind, like in kinds for form in kind.form(like)]
    return sum((form.length or 0) * getattr(torch, form.dtype).itemsize for form in forms)
