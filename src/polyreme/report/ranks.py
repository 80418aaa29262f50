"""What every rank did last, as ``ranks/attempt-A.json`` of a broken attempt tells it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec

MAX_SEQS = 10  # columns of the table: collectives, the last ones
MAX_RANKS = 32  # rows: the odd ranks first, then those behind
Call = tuple[str, tuple[int, ...], str]


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one rank; seconds since the attempt's first rank began."""

    seq: int
    op: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    start_s: float
    end_s: float | None = None

    @property
    def call(self) -> Call:
        """What must be the same on all ranks."""
        return self.op, self.shape, self.dtype

    @property
    def words(self) -> str:
        """Operation, shape and type."""
        shape = f" {list(self.shape)}" if self.dtype else ""
        return f"{self.op}{shape} {self.dtype}".rstrip()


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a rank at the end of an attempt."""

    rank: int
    pid: int = 0
    host: str = ""
    state: str = "unknown"
    doing: str = ""
    waiting: int = 0
    message: str | None = None
    stack: str | None = None
    events: tuple[Told, ...] = ()


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, on which rank."""

    what: str
    rank: int | None = None
    op: str | None = None
    stack: str | None = None


class Last(msgspec.Struct, frozen=True, kw_only=True):
    """The last events of every rank of an attempt."""

    attempt: int
    ranks: tuple[Rank, ...]
    verdict: Blame | None = None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A collective in the table.

    `state` is done, inside, other (not what more than half of the ranks called) or none.
    """

    state: str
    short: str = ""
    full: str = ""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A rank in the table."""

    rank: int
    odd: bool
    state: str
    doing: str
    where: str
    cells: tuple[Cell, ...]
    stack: str | None


class Aligned(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks by collectives with the same number."""

    attempt: int
    heads: tuple[str, ...]
    rows: tuple[Row, ...]
    n_hidden: int


def read_ranks(folder: Path, missing: list[str]) -> tuple[Last, ...]:
    """Every ``ranks/attempt-A.json`` of a run folder; a line in `missing` for bad ones."""
    found = []
    for path in sorted((folder / "ranks").glob("attempt-*.json"), key=_number):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=Last))
        except (OSError, msgspec.DecodeError) as error:
            missing.append(
                f"ranks/{path.name} cannot be read ({error}): what the ranks did last is unknown"
            )
    return tuple(found)


def aligned(last: Last) -> Aligned:
    """The last collectives of every rank, a column for each sequence number, the latest first."""
    by_rank = {rank.rank: {event.seq: event for event in rank.events} for rank in last.ranks}
    seqs = sorted({seq for events in by_rank.values() for seq in events}, reverse=True)
    seqs = seqs[:MAX_SEQS]
    usual = {
        seq: Counter(events[seq].call for events in by_rank.values() if seq in events)
        for seq in seqs
    }
    odd = last.verdict.rank if last.verdict is not None else None

    def behind(rank: Rank) -> tuple[bool, int, int]:
        return rank.rank != odd, max(by_rank[rank.rank], default=0), rank.rank

    shown = sorted(last.ranks, key=behind)[:MAX_RANKS]
    rows = tuple(
        Row(
            rank=rank.rank,
            odd=rank.rank == odd,
            state=rank.state,
            doing=rank.doing if rank.message is None else f"{rank.doing}, in {rank.message}",
            where=f"process {rank.pid}" + (f" on {rank.host}" if rank.host else ""),
            cells=tuple(_cell(by_rank[rank.rank].get(seq), usual[seq]) for seq in seqs),
            stack=rank.stack,
        )
        for rank in sorted(shown, key=lambda rank: rank.rank)
    )
    heads = tuple(f"#{seq}" for seq in seqs)
    n_hidden = len(last.ranks) - len(shown)
    return Aligned(attempt=last.attempt, heads=heads, rows=rows, n_hidden=n_hidden)


def _cell(event: Told | None, calls: Counter[Call]) -> Cell:
    if event is None:
        return Cell(state="none", full="not called")
    state = "done" if event.end_s is not None else "inside"
    if 2 * calls[event.call] <= calls.total() and len(calls) > 1:
        state = "other"
    end = "never left" if event.end_s is None else f"left at {event.end_s:.3f} s"
    full = f"{event.words}, entered at {event.start_s:.3f} s, {end}"
    return Cell(state=state, short=event.op, full=full)


def _number(path: Path) -> tuple[int, str]:
    match = re.search(r"\d+", path.stem)
    return int(match[0]) if match else -1, path.name
