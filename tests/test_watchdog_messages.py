"""Ranks that wait for messages of each other: who keeps them waiting is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import launch_entries as entries
from polyreme.runtime.launch import PRELOAD, Launcher, RankFailed
from polyreme.runtime.record import Account, Awaited, Event, Record, read, waiting
from polyreme.runtime.verdict import last_op, stall


def _account(rank: int, source: int | None = None, op: str = "recv", **more) -> Account:
    events = tuple(
        Event(seq=n, op=f"op {n}", shape=(), dtype="", n_ranks=3, start_s=n, end_s=n + 0.5)
        for n in range(1, more.get("seq", 4) + 1)
    )
    message = None
    if source is not None:
        message = Awaited(op=op, peer=source, n_bytes=1024, start_s=0.0)
    given = {"state": "running", "seq": 4, "message": message, "events": events, **more}
    return Account(rank=rank, **given)


def test_a_message_takes_no_number_of_a_collective(tmp_path: Path) -> None:
    """Else ranks that send and receive in turns were said to call different collectives."""
    path = tmp_path / "0.record"
    record = Record(path)
    with record.inside("barrier", n_ranks=2):
        pass
    trail = record.trail
    with record.message("recv", 1, 2048):
        first = waiting(path)[0]
        found = read(path, 0)
    with record.message("send", 1, 8):
        assert waiting(path)[0] not in (0, first)
    assert str(found.message) == "recv of 2,048 bytes from rank 1"
    assert (found.seq, found.waiting, record.trail) == (1, 0, trail)
    assert (waiting(path)[0], read(path, 0).message) == (0, None)
    assert record.begin("barrier", None, 2) == 2


def test_whom_others_await_at_last_is_named_where_all_but_it_stand_in_messages() -> None:
    accounts = [_account(0, 2), _account(1, 0), _account(2), _account(3, 1)]
    verdict = stall(accounts, 3.0)
    assert (verdict.kind, verdict.rank, verdict.op) == ("stalled", 2, "recv")
    assert verdict.what.startswith(
        "rank 2 of 4 does not come to recv of 1,024 bytes from rank 2, in which rank 0 waited for "
        "3 s, and rank 1, 3 elsewhere: it is outside of any"
    )


def test_a_rank_that_stopped_in_a_message_is_named_by_who_waits_for_it() -> None:
    stopped = _account(1, 0, state="stopped")
    verdict = stall([_account(0, 1), stopped, _account(2, 1, op="send")], 3.0)
    assert (verdict.rank, verdict.op) == (1, "recv")
    assert "its process is stopped" in verdict.what


def test_ranks_in_the_next_collective_wait_for_one_that_waits_for_a_message() -> None:
    ahead = _account(2, seq=5, waiting=5)
    verdict = stall([_account(0, 1), _account(1), ahead], 3.0)
    assert (verdict.rank, verdict.op) == (1, "recv")
    assert "and rank 2 elsewhere" in verdict.what


def test_ranks_that_wait_for_each_other_blame_nobody() -> None:
    verdict = stall([_account(0, 1), _account(1, 2), _account(2, 0)], 3.0)
    assert (verdict.rank, verdict.op) == (None, "recv")
    assert "rank 2 in recv of 1,024 bytes from rank 0" in verdict.what
    assert last_op(_account(0, 1)) == "recv"


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(PRELOAD) as launcher:
        yield launcher


@pytest.mark.parametrize("how", ["SIGSTOP", "sleep"])
@pytest.mark.slice("sleep")
def test_a_rank_that_sends_nothing_more_is_named_in_time(launcher: Launcher, how: str) -> None:
    """Rank 1 waits for it in a receive, rank 0 until its own message is taken."""
    with pytest.raises(RankFailed) as caught:
        launcher.run(entries.passes_round, (2, how), n_processes=3, timeout_s=2.0)
    assert not psutil.Process(launcher._zygote.pid).children()
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.rank) == ("stalled", 2)
    assert verdict.op in ("recv", "send")
    assert "of 33,554,432 bytes" in verdict.what
    assert {account.message is not None for account in caught.value.accounts[:2]} == {True}
