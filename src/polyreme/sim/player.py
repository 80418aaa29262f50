"""Who is played: a worker or a server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..algo.effects import Compute, Effect, Local, Record, Sleep, with_suspects
from ..algo.worker import Worker
from .links import Mail
from .spent import Spent


@dataclass(kw_only=True, slots=True)
class Player:
    """One worker: its state between rounds, its program within one, its mail.

    `blocked` is the effect that it waits at, since `since_s`, and until `until_s` where that is
    known; `n_waits` tells its waits apart. `begun` says that its round has had an answer: until
    then it can be taken back. One that is `gone` has another in its place.
    """

    me: Worker
    state: dict[str, Any]
    program: Any = None
    inbox: list[Mail] = field(default_factory=list)
    blocked: Effect | None = None
    since_s: float = 0.0
    until_s: float = 0.0
    n_waits: int = 0
    n_batches: int = 0
    begun: bool = False
    gone: bool = False
    spent: Spent = field(default_factory=Spent)
    suspects: tuple[int, ...] = ()

    def recorded(self, record: Record) -> Record:
        """A record of its program, with those that are suspects since the last."""
        found, self.suspects = self.suspects, ()
        return with_suspects(record, found)

    def takes(self, seconds: float, now_s: float, waits: bool = False) -> None:
        """It computes, or waits, for so long."""
        self.until_s = now_s + seconds
        if waits:
            self.spent.wait_s += seconds
        else:
            self.spent.compute_s += seconds

    def left(self, now_s: float) -> None:
        """It goes, from whatever it was at."""
        if isinstance(self.blocked, Compute | Local):
            self.spent.compute_s -= self.until_s - now_s
        elif isinstance(self.blocked, Sleep):
            self.spent.wait_s -= self.until_s - now_s
        else:
            self.spent.wait_s += now_s - self.since_s
        if self.program is not None:
            self.program.close()
        self.gone, self.blocked = True, None
