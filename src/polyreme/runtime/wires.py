"""Messages between the stages of a pipeline, each pair of ranks in one order.

What a rank sends follows from its order of actions, and so does the order in which its peer posts
the receives: two ranks cannot disagree about which message comes next. Messages up the ranks and
down them go over groups of their own, since some backends carry out what two ranks exchange in
the order in which they were asked. On accelerators the first step of its kind goes over the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..plan.ir import Action
from .applied import Applied


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage hands to a neighbour: of activations ("F"), or of their gradients ("B")."""

    kind: str
    stage: int  # that hands it on
    microbatch: int
    copy: int = 0
    token_slice: int = 0

    @property
    def to(self) -> int:
        """The stage that takes it."""
        return self.stage + 1 if self.kind == "F" else self.stage - 1


def given(action: Action, n_stages: int) -> Message | None:
    """What a stage hands on after an action."""
    kind = {"F": "F", "B": "B", "I": "B"}.get(action.kind)
    if kind is None or action.stage == (n_stages - 1 if kind == "F" else 0):
        return None
    return Message(
        kind=kind,
        stage=action.stage,
        microbatch=action.microbatch,
        copy=action.copy,
        token_slice=action.token_slice,
    )


def taken(action: Action, n_stages: int) -> Message | None:
    """What a stage must be handed before an action."""
    kind = {"F": "F", "B": "B", "I": "B"}.get(action.kind)
    if kind is None or action.stage == (0 if kind == "F" else n_stages - 1):
        return None
    return Message(
        kind=kind,
        stage=action.stage - 1 if kind == "F" else action.stage + 1,
        microbatch=action.microbatch,
        copy=action.copy,
        token_slice=action.token_slice,
    )


class Wires:
    """Sends and receives of this process, in the order of everyone's actions.

    What a stage gives has the forms that the graph says, and so has its gradient; `whole` if
    passes are over all tokens, though training cuts them. What was sent is kept until a message
    comes that the peer gave after it had taken it: work of a send need not say that it is done
    before it is waited for (gloo's does not).
    """

    def __init__(self, applied: Applied, *, whole: bool = False) -> None:
        self._places, self._traffic = applied.places, applied.traffic
        self._device, self._grid = applied.device, applied.grid
        self._pipe = applied.places.cell.pipe
        self._forms, self._slices = applied.forms, () if whole else applied.slices
        self._sends: dict[Message, list[tuple[Any, torch.Tensor, int]]] = {}
        self._kept: dict[Message, tuple[torch.Tensor, ...]] = {}
        self._posted: dict[Message, list[tuple[Any, torch.Tensor]]] = {}
        self._queues: dict[int, deque[Message]] = {}
        self._arrived: dict[Message, list[Message]] = {}
        self._sizes: Mapping[int, int] = {}
        self._on_host = True
        self._rehearsed: set[tuple[int, ...]] = set()

    def begin(self, orders: Sequence[Sequence[Action]], sizes: Mapping[int, int]) -> None:
        """Start to play the order of each pipeline rank over microbatches of so many samples."""
        n = len(self._grid.holders)
        self._sizes = sizes
        self._on_host = self._rehearses(tuple(sizes.values()))
        self._queues, self._arrived = {}, {}
        for peer, actions in enumerate(orders):
            if peer == self._pipe:
                continue
            queue = self._queues[peer] = deque()
            arrived: list[Message] = []
            for action in actions:
                if action.microbatch not in sizes:
                    continue
                ours = taken(action, n)
                if ours is not None and self._holder(ours.stage, ours.copy) == self._pipe:
                    arrived.append(ours)
                message = given(action, n)
                if message is not None and self._holder(message.to, message.copy) == self._pipe:
                    queue.append(message)
                    self._arrived[message] = arrived
                    arrived = []

    def send(self, message: Message, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors to the stage of the message, wherever it is."""
        pipe = self._holder(message.to, message.copy)
        if pipe == self._pipe:
            self._kept[message] = tuple(tensors)
            return
        self._sends[message] = [self._start_send(each.contiguous(), pipe) for each in tensors]

    def ask(self, message: Message) -> None:
        """Ask for a message before it is needed."""
        pipe = self._holder(message.stage, message.copy)
        while pipe != self._pipe and message not in self._posted:
            self._post(self._queues[pipe].popleft(), pipe)

    def take(self, message: Message) -> list[torch.Tensor]:
        """What was handed over."""
        if message in self._kept:
            return list(self._kept.pop(message))
        self.ask(message)
        pipe = self._holder(message.stage, message.copy)
        found = self._posted.pop(message)
        for work, into in found:
            self._wait(work, "recv", self._places.rank_at(pipe=pipe), into.nbytes)
        for each in self._arrived.pop(message):
            self._sent(each)
        return [into.to(self._device) for _, into in found]

    def end(self) -> None:
        """Wait until all that was sent has gone."""
        for message in list(self._sends):
            self._sent(message)
        assert not self._kept, "all that was handed over was taken"
        assert not self._posted, "all that was asked for was taken"

    def _post(self, message: Message, pipe: int) -> None:
        """Ask for a message; all before it from this rank are asked for already."""
        rank = self._places.rank_at(pipe=pipe)
        group = self._places.wire(pipe, self._pipe, on_host=self._on_host)
        # Gradients have the forms of what the stage that takes them has given.
        forms = self._forms[message.stage if message.kind == "F" else message.to]
        size = self._sizes[message.microbatch]
        if self._slices:
            start, stop = self._slices[message.token_slice]
            forms = tuple((dtype, (stop - start, *shape[1:])) for dtype, shape in forms)
        device = torch.device("cpu") if self._on_host else self._device
        buffers = [
            torch.empty((size, *shape), dtype=dtype, device=device) for dtype, shape in forms
        ]
        self._posted[message] = [(dist.irecv(each, rank, group=group), each) for each in buffers]

    def _start_send(self, tensor: torch.Tensor, pipe: int) -> tuple[Any, torch.Tensor, int]:
        rank = self._places.rank_at(pipe=pipe)
        group = self._places.wire(self._pipe, pipe, on_host=self._on_host)
        tensor = tensor.cpu() if self._on_host else tensor
        self._traffic.sent_bytes += tensor.nbytes
        self._traffic.n_sends += 1
        return dist.isend(tensor, rank, group=group), tensor, rank

    def _rehearses(self, sizes: tuple[int, ...]) -> bool:
        """Whether messages go over host memory, as they do on accelerators the first time.

        There a kernel waits for a message, and so does all that the host does for the first time
        and that waits for kernels: to load others, to get memory. Two ranks that wait so for each
        other would wait for ever.
        """
        known = sizes in self._rehearsed
        self._rehearsed.add(sizes)
        return self._device.type == "cpu" or not known

    def _sent(self, message: Message) -> None:
        """Wait until a message has gone, and let go of its tensors."""
        for work, tensor, peer in self._sends.pop(message):
            self._wait(work, "send", peer, tensor.nbytes)

    def _wait(self, work: Any, op: Any, peer: int, n_bytes: int) -> None:
        with self._traffic.record.message(op, peer, n_bytes), self._traffic.blocked():
            work.wait()

    def _holder(self, stage: int, copy: int) -> int:
        """The pipeline rank of a stage, in the direction of that copy."""
        return self._grid.holders[stage][copy]
