"""What players say to each other, over letters: who hears what, of whom, and what is sent again."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...algo.effects import Received, Recv
from ...algo.packet import Kinds, Message, from_bytes, to_bytes
from ...algo.sync.peers import Peers
from ...algo.worker import Worker
from ..transport.letters import Kind, Letter
from ..transport.local import Address, Boxes, Office

_N_KEPT = 4  # a worker says no more to a server before it is answered


class Mail(NamedTuple):
    """What came and was not taken: whose it is, its tag, its bytes, and its letter's numbers."""

    source: int
    tag: int
    body: bytes | memoryview
    life: int = 0
    number: int = -1


@dataclass(kw_only=True)
class _Link:
    """To and from one other player: how often it was begun, letters sent and come, those kept.

    Kept are those to or from a server that remembers, until they are known to have come. `left` is
    the life that home said had ended, if nothing came of it since.
    """

    life: int = 0
    sent: int = 0
    came: int = 0
    left: int = -1
    kept: deque[tuple[int, bytes]] = field(default_factory=deque)


class Post:
    """One player's letters. `on_refused` hears of those without the run's token.

    A worker that was begun anew speaks and is spoken to anew; what was said to an earlier life of
    it is dropped, and the servers that hear of it are told first that it was gone. A server that
    `remembers` is said again what it has not taken, and says again what has not come, in order.
    """

    def __init__(
        self,
        sync: Peers,
        me: Worker,
        life: int,
        address: Address,
        on_refused: Callable[[], None],
    ) -> None:
        self._sync, self._me, self._life = sync, me, life
        self._office = Office(address, me.rank, on_refused)
        self._boxes = Boxes(address, me.rank, ())
        self._links: dict[int, _Link] = {}
        self._inbox: deque[Mail] = deque()
        self._out: list[tuple[int, int, int, bytes | memoryview]] = []
        self.sent_bytes = 0

    def close(self, linger_s: float) -> None:
        """Close, waiting so long for letters that are on their way."""
        self._boxes.close(linger_s)
        self._office.close()

    # Messages -----------------------------------------------------------------------------------

    def send(self, to: int, message: Message, tag: int) -> None:
        """Say something, once it is let go of."""
        link = self._link(to)
        body = to_bytes(message).numpy().data
        link.sent += 1
        if self._is_sure(to):
            link.kept.append((link.sent, bytes(body)))
            while to >= self._me.n and len(link.kept) > _N_KEPT:
                link.kept.popleft()
        machine = self._sync.machine
        if machine(to, self._me.n) != machine(self._me.rank, self._me.n):
            self.sent_bytes += body.nbytes
        self._out.append((to, link.sent, tag, body))

    def flush(self) -> None:
        """Let go of what was said."""
        for each in self._out:
            self._post(*each)
        self._out.clear()

    def take(self, effect: Recv) -> tuple[Received, Mail] | None:
        """The first message that came of those that are wanted."""
        if effect.tag:
            self._inbox = deque(m for m in self._inbox if not effect.drops(m.source, m.tag))
        for at, mail in enumerate(self._inbox):
            if effect.wants(mail.source, mail.tag):
                del self._inbox[at]
                data = torch.frombuffer(bytearray(mail.body), dtype=torch.uint8)
                kinds = effect.kinds
                if effect.brief is not None and data.numel() == _n_bytes(effect.brief):
                    kinds = effect.brief
                return Received(source=mail.source, message=from_bytes(data, kinds)), mail
        return None

    def has_of(self, source: int | None) -> bool:
        """Whether something came from there."""
        return any(mail.source == source for mail in self._inbox)

    # Letters ------------------------------------------------------------------------------------

    def hear(self, wait_s: float) -> None:
        """Wait for the next letter, but no longer than so many seconds."""
        letter = self._office.take(wait_s)
        if letter is None or letter.kind is not Kind.SAID:
            return
        source, n = letter.source, self._me.n
        to_a_life = source >= n or not self._is_sure(source)
        if (self._me.rank < n) != (source < n) and to_a_life and letter.covered != self._life:
            return  # to one that is gone, and says nothing of who is there
        if letter.life < self._link(source).life:
            return  # of one that is gone
        if letter.life > self._link(source).life:
            self._begun_anew(source, letter.life)
        link = self._link(source)
        if self._is_sure(source) and letter.number != link.came + 1:
            return  # twice, or too early: it is said again
        link.came, link.left = letter.number, -1
        if self._is_sure(source) and source < n:
            while link.kept and link.kept[0][0] <= letter.covered:
                link.kept.popleft()
        tag = letter.covered if max(source, self._me.rank) < n else 0
        self._inbox.append(Mail(source, tag, letter.body, letter.life, letter.number))

    def left(self, worker: int, life: int) -> None:
        """Home says that a worker is gone."""
        if worker not in self._heard_of or life < self._link(worker).life:
            return
        self._links[worker].left = life
        self._inbox.append(Mail(worker, 0, to_bytes(self._sync.gone()).numpy().tobytes(), life))

    def again(self, server: int, life: int) -> bool:
        """Home says that a server was begun anew; whether that is news."""
        is_news = life > self._link(server).life
        if is_news:
            self._begun_anew(server, life)
        self.repeat(server)
        return is_news

    def repeat(self, to: int | None = None) -> None:
        """Say again what is not known to have come."""
        for other in self._links if to is None else (to,):
            for number, body in self._links[other].kept:
                self._post(other, number, 0, body)

    def _begun_anew(self, other: int, life: int) -> None:
        link = self._link(other)
        if other >= self._me.n:
            link.life = life
            if not self._is_sure(other):  # what it said is forgotten there
                self._inbox = deque(mail for mail in self._inbox if mail.source != other)
            return
        if link.left < link.life:
            self.left(other, link.life)
        self._links[other] = _Link(life=life, left=link.left)

    def _post(self, to: int, number: int, tag: int, body: bytes | memoryview) -> None:
        n, link = self._me.n, self._links[to]
        covered = tag
        if self._me.rank >= n or to >= n:
            covered = link.came if self._me.rank < n and self._is_sure(to) else link.life
        self._boxes.send(to, Letter(Kind.SAID, self._me.rank, self._life, number, covered, body))

    def _link(self, other: int) -> _Link:
        return self._links.setdefault(other, _Link())

    def _is_sure(self, other: int) -> bool:
        return self._sync.remembers and (other >= self._me.n) != (self._me.rank >= self._me.n)

    @property
    def _heard_of(self) -> range:
        """Workers of which this player is told when they go."""
        me, n = self._me.rank, self._me.n
        hear = [worker for worker in range(n) if me in self._sync.hear_of(worker, n)]
        return range(hear[0], hear[-1] + 1) if hear else range(0)

    # What is written down -----------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Letters to and from each other player, of its last life and this one's; those unread."""
        found = {f"sent/{other}": link.sent for other, link in self._links.items()}
        found |= {f"came/{other}": link.came for other, link in self._links.items()}
        return found | {"unread": len(self._inbox)}

    def written(self) -> dict[str, Any]:
        """What a server that remembers must know to go on from here."""
        links = {
            str(other): [
                *(link.life, link.sent, link.came, link.left),
                [[number, b64encode(body).decode()] for number, body in link.kept],
            ]
            for other, link in self._links.items()
        }
        inbox = [[*m[:2], b64encode(m.body).decode(), *m[3:]] for m in self._inbox]
        return {"links": links, "inbox": inbox}

    def restore(self, written: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._inbox.extend(
            Mail(source, tag, b64decode(body), *more)
            for source, tag, body, *more in written["inbox"]
        )
        for other, (life, sent, came, left, kept) in written["links"].items():
            self._links[int(other)] = _Link(
                life=life,
                sent=sent,
                came=came,
                left=left,
                kept=deque((number, b64decode(body)) for number, body in kept),
            )


def _n_bytes(kinds: Kinds) -> int:
    """Bytes of a message of these, whose lengths are known."""
    forms = (form for kind, like in kinds for form in kind.form(like))
    return sum(getattr(torch, name).itemsize * (length or 0) for name, length in forms)
