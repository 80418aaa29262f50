"""Where attacks come in: what a hostile worker sends, and rows as hostile workers would have them.

A worker's state of them has ``own`` (of its attack on what it sends) and ``all`` (of those that see
the others, by their number: the same on all workers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .attack.kind import Aim, AttackKind
from .compress.dense import Dense
from .compress.maybe import Maybe
from .effects import Split, settled
from .packet import Packet

if TYPE_CHECKING:
    import torch

    from .aggregate.kind import Combined
    from .draw import Draw
    from .packet import Message
    from .worker import Worker

State = dict[str, Any]
Combining = Callable[[Sequence["torch.Tensor"]], "Split[Combined]"]
_USE = -2  # of a step's random numbers


def init(params: torch.Tensor, me: Worker) -> State:
    """State of a worker's attacks before the first step."""
    seeing = ((str(at), each) for at, each in enumerate(me.attack) if each.sees)
    return {
        "own": own(params, me),
        "all": {at: each.init(params, me.n) for at, each in seeing},
    }


def own(params: torch.Tensor, me: Worker) -> State:
    """State of a hostile worker's own attack before the first step."""
    attack = of(me)
    return {} if attack is None else attack.init(params, me.n)


def of(me: Worker) -> AttackKind | None:
    """The attack on what this worker sends, if there is one."""
    return next((each for each in me.attack if me.rank in each.workers and not each.sees), None)


def silent(me: Worker, without: bool | None = None) -> bool | None:
    """Whether this worker sends nothing; None where none is silent, with or without attacks."""
    mute = [worker for each in me.attack if each.is_silent for worker in each.workers]
    return bool(without) or me.rank in mute if mute else without


def sent(
    vector: torch.Tensor, state: State, me: Worker, draw: Draw
) -> Split[tuple[torch.Tensor, State]]:
    """What this worker sends where that vector is meant, and the next state of its attack."""
    attack = of(me)
    if attack is None or attack.is_silent or attack.of_batches:
        return vector, state
    return (yield from settled(attack.sent(vector, state, draw.at(_USE))))


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The attacks of those that see the others, in one step; n workers run."""

    attack: tuple[AttackKind, ...]
    n: int
    draw: Draw

    @staticmethod
    def of(me: Worker, draw: Draw) -> Sight | None:
        """Those of a run, if there are any."""
        sees = any(each.sees for each in me.attack)
        return Sight(attack=me.attack, n=me.n, draw=draw.at(_USE)) if sees else None

    def among(
        self,
        rows: dict[int, torch.Tensor],
        messages: Sequence[Message],
        state: State,
        combined: Combining,
    ) -> Split[tuple[list[torch.Tensor], State]]:
        """Rows as the hostile would have them, and the next state of attacks.

        What they send goes through the compressor, as if for the first time.
        """
        hostile = {worker for each in self.attack for worker in each.workers}
        honest = {worker: row for worker, row in rows.items() if worker not in hostile}
        after = dict(state)
        for at, each in enumerate(self.attack):
            mine = [worker for worker in each.workers if worker in rows]
            if not (each.sees and mine and honest):
                continue

            def played(vector: torch.Tensor) -> Split[torch.Tensor]:
                trial = rows | dict.fromkeys(mine, vector)  # noqa: B023
                return (yield from combined(list(trial.values())))[0]

            draw = replace(self.draw.at(at), worker=mine[0])  # the same wherever it is played
            aim = Aim(n=self.n, draw=draw, aggregate=played)
            vector, after[str(at)] = yield from settled(each.made(honest, state[str(at)], aim))
            rows = rows | dict.fromkeys(mine, _packed(vector, messages[mine[0]], draw))
        return list(rows.values()), after


def _packed(vector: torch.Tensor, like: Message, draw: Draw) -> torch.Tensor:
    """A vector as packets like those of a message hold it."""
    import torch

    sizes = [packet.like.n_entries for packet in like.packets]
    pieces: tuple[torch.Tensor, ...] = vector.split(sizes)  # type: ignore[no-untyped-call]
    found = []
    for at, (piece, packet) in enumerate(zip(pieces, like.packets, strict=True)):
        kind = packet.kind.inner if isinstance(packet.kind, Maybe) else packet.kind
        if not isinstance(kind, Dense):
            x = piece.view(packet.like.shape)
            buffers, _ = kind.encode(x, kind.init(packet.like), draw.at(at))
            piece = Packet(buffers=buffers, like=packet.like, kind=kind).decode().reshape(-1)
        found.append(piece)
    return torch.cat(found)
