"""Who is to blame when ranks no longer go on together, from what their records say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from ..errors import RunError
from .record import N_TOLD, Account, Event

if TYPE_CHECKING:
    from .mesh import World

_CONTEXT = 3  # collectives before a difference that tell what should follow
_WAITS = ("distributed_c10d", "_functional_collectives")  # files in whose frames a rank waits


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: on which rank (None: it cannot be told), in which operation.

    A rank "stalled" that did not come where others wait, "diverged" that called something else,
    "died" that ended without a word, failed in the "backend" of communication or the device, or
    raised an "error" of another kind.
    """

    kind: Literal["stalled", "diverged", "died", "backend", "error"]
    rank: int | None
    op: str | None
    what: str
    stack: str | None = None


class Diverged(RunError):
    """Ranks called different collectives; `verdict` names the one that differs."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.what, rank=verdict.rank, op=verdict.op)


def named(error: Exception) -> Verdict:
    """The verdict that an error carries: whom it names, if anyone."""
    if isinstance(error, Diverged):
        return error.verdict
    rank, op = (error.rank, error.op) if isinstance(error, RunError) else (None, None)
    return Verdict(kind="error", rank=rank, op=op, what=str(error))


def difference(accounts: Sequence[Account]) -> Verdict | None:
    """The first collective that ranks of a pipeline rank called otherwise than others of it."""
    for pipe in sorted({account.pipe for account in accounts}):
        found = _difference([account for account in accounts if account.pipe == pipe])
        if found is not None:
            return found
    return None


def _difference(accounts: Sequence[Account]) -> Verdict | None:
    calls = {account.rank: {event.seq: event for event in account.events} for account in accounts}
    seqs = Counter(seq for events in calls.values() for seq in events)
    for seq in sorted(seq for seq, n_ranks in seqs.items() if n_ranks > 1):
        said = {rank: events[seq] for rank, events in calls.items() if seq in events}
        if len({event.call for event in said.values()}) > 1:
            return _odd(seq, said, calls)
    return None


def stall(accounts: Sequence[Account], timeout_s: float) -> Verdict:
    """Who keeps the others waiting; asked when some rank waited for `timeout_s`."""
    different = difference(accounts)
    if different is not None:
        return different
    waiting = [account for account in accounts if account.stands and account.state == "running"]
    late = _awaited(min(accounts, key=_lateness), {account.rank: account for account in accounts})
    if late is None:
        return _circle(waiting, timeout_s)
    others = [account for account in waiting if account.rank != late.rank]
    for other in others:
        if other.message is not None and other.message.peer == late.rank:
            return _silent(late, other, others, len(accounts), timeout_s)
    ahead = max(others, key=lambda account: account.seq, default=late)
    missed = ahead.event(max(late.seq + (not late.waiting), 1)) or ahead.event(ahead.waiting)
    op = "communication" if missed is None else str(missed)
    waits = _ranks([account.rank for account in others])
    if late.state == "running" and late.waiting and late.seq == max(a.seq for a in accounts):
        outside = [a for a in accounts if a.stack and not any(name in a.stack for name in _WAITS)]
        if len(outside) != 1:
            what = f"all ranks are inside {op}, and none went on within {timeout_s:g} s"
            return Verdict(kind="stalled", rank=None, op=_name(missed), what=what)
        late = outside[0]
        waits = _ranks([account.rank for account in accounts if account.rank != late.rank])
    there = missed is not None and late.waiting == missed.seq
    what = (
        f"rank {late.rank} of {len(accounts)} {'stands still in' if there else 'did not come to'} "
        f"{op}, in which {waits} waited for {timeout_s:g} s: {_state(late)}"
    )
    return Verdict(kind="stalled", rank=late.rank, op=_name(missed), what=what, stack=late.stack)


def last_op(account: Account) -> str | None:
    """The collective in which a rank stood, or that it called last."""
    if account.message is not None:
        return account.message.op
    return _name(account.event(account.waiting or account.seq))


def diverged(world: World) -> RunError:
    """The error for ranks whose trails differ; all call it together and get the same."""
    import torch.distributed as dist

    own = world.record.account()
    accounts: list[Account] = [own] * world.n_ranks
    dist.all_gather_object(accounts, own, group=world.group)
    verdict = difference(accounts)
    if verdict is None:
        counts = ", ".join(f"rank {account.rank}: {account.seq}" for account in accounts)
        return RunError(f"ranks called different collectives; their numbers: {counts}")
    return Diverged(verdict)


def attempt_json(attempt: int, verdict: Verdict | None, accounts: Sequence[Account]) -> bytes:
    """``ranks/attempt-A.json``: the last events of every rank, in seconds since the first began."""
    known = [account.began_s for account in accounts if account.began_s]
    origin_s = min(known, default=time.time())
    told = {
        "attempt": attempt,
        "verdict": verdict,
        "ranks": [
            {
                "rank": account.rank,
                "pid": account.pid,
                "host": account.host,
                "state": account.state,
                "doing": account.doing,
                "waiting": account.waiting,
                "message": None if account.message is None else str(account.message),
                "stack": account.stack,
                "events": [_told(event, origin_s) for event in account.events[-N_TOLD:]],
            }
            for account in sorted(accounts, key=lambda account: account.rank)
        ],
    }
    return msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n"


def _told(event: Event, origin_s: float) -> dict[str, object]:
    end_s = None if event.end_s is None else round(event.end_s - origin_s, 6)
    return {
        "seq": event.seq,
        "op": event.op,
        "shape": event.shape,
        "dtype": event.dtype,
        "start_s": round(event.start_s - origin_s, 6),
        "end_s": end_s,
    }


def _lateness(account: Account) -> tuple[bool, int, bool, int]:
    """Sorts first whom others wait for: a process that cannot go on, or else the one behind."""
    return account.state == "running", account.seq, account.stands, account.rank


def _awaited(account: Account, accounts: Mapping[int, Account]) -> Account | None:
    """Whom it waits for at last, by messages; None where they wait for each other in a circle."""
    seen: set[int] = set()
    while account.message is not None and account.state == "running":
        if account.rank in seen:
            return None
        seen.add(account.rank)
        account = accounts.get(account.message.peer, Account(rank=account.message.peer))
    return account


def _silent(
    late: Account, other: Account, others: Sequence[Account], n_ranks: int, timeout_s: float
) -> Verdict:
    """The verdict on a rank that takes no part in a message."""
    assert other.message is not None
    more = [account.rank for account in others if account.rank != other.rank]
    too = f", and {_ranks(more)} elsewhere" if more else ""
    what = (
        f"rank {late.rank} of {n_ranks} does not come to {other.message}, in which rank "
        f"{other.rank} waited for {timeout_s:g} s{too}: {_state(late)}"
    )
    op = other.message.op
    return Verdict(kind="stalled", rank=late.rank, op=op, what=what, stack=late.stack)


def _circle(waiting: Sequence[Account], timeout_s: float) -> Verdict:
    """The verdict on ranks that wait for messages of each other."""
    stand = [account for account in waiting if account.message is not None]
    each = ", ".join(f"rank {account.rank} in {account.message}" for account in stand[:8])
    what = f"ranks wait for each other for {timeout_s:g} s: {each}"
    op = stand[0].message.op if stand[0].message is not None else None
    return Verdict(kind="stalled", rank=None, op=op, what=what)


def _state(account: Account) -> str:
    event = account.event(account.seq)
    last = f"its last was {event}" if event is not None else "it had called none"
    if account.state != "running":
        return f"its process is {account.state}; {last}"
    if account.message is not None:
        return f"it is in {account.message}; {last}"
    if account.waiting:
        return last
    doing = f", {account.doing}" if account.doing else ""
    return f"it is outside of any{doing}; {last}"


def _odd(seq: int, said: dict[int, Event], calls: dict[int, dict[int, Event]]) -> Verdict:
    counts = Counter(event.call for event in said.values())
    most = max(counts.values())
    usual = [call for call, count in counts.items() if count == most]
    expected = _expected(seq, calls)
    right = expected if expected in usual else usual[0]
    odd = next(rank for rank in sorted(said) if said[rank].call != right)
    like = next(rank for rank in sorted(said) if said[rank].call == right)
    alike = [rank for rank in said if said[rank].call == right]
    what = (
        f"rank {odd} of {len(calls)} called {said[odd]} where {_ranks(alike)} called {said[like]}"
    )
    return Verdict(kind="diverged", rank=odd, op=said[like].op, what=what)


def _expected(seq: int, calls: dict[int, dict[int, Event]]) -> object:
    """What followed the last time that the same collectives had come before."""
    events = max(calls.values(), key=len)
    before = [events[at].call for at in range(seq - _CONTEXT, seq) if at in events]
    for past in range(seq - 1, min(events) + len(before) - 1, -1):
        said = [events[at].call for at in range(past - len(before), past) if at in events]
        if before and said == before and past in events:
            return events[past].call
    return None


def _name(event: Event | None) -> str | None:
    return None if event is None else event.op


def _ranks(ranks: Sequence[int]) -> str:
    listed = sorted(ranks)
    if not listed:
        return "nobody else"
    if len(listed) > 8:
        return f"{len(listed)} others"
    return f"rank {', '.join(map(str, listed))}"
