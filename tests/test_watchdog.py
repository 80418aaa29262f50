"""A rank that stalls, dies or does otherwise than the rest is named; nothing is left of a run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import launch_entries as entries
from polyreme.errors import ConfigError, PolyremeError, RunError, Violation
from polyreme.runtime.launch import PRELOAD, Launcher, RankFailed
from polyreme.runtime.record import N_SLOTS, Account, Event, Record, read, waiting
from polyreme.runtime.verdict import Verdict, attempt_json, diverged, stall
from polyreme.runtime.watchdog import Watchdog, home

TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher((*PRELOAD, "polyreme.runtime.timing")) as launcher:
        yield launcher


def _failure(launcher: Launcher, rank: int, how: str, n: int = 3) -> RankFailed:
    """What the launcher says of a rank that misbehaves; no rank outlives it."""
    with pytest.raises(RankFailed) as caught:
        launcher.run(entries.misbehaves, (rank, how), n_processes=n, timeout_s=TIMEOUT_S)
    assert not psutil.Process(launcher._zygote.pid).children()
    return caught.value


@pytest.mark.slice(1)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("sleep", "outside of any, counting"),
        ("spin", "outside of any, counting"),
        ("SIGSTOP", "its process is stopped"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_its_stack(
    launcher: Launcher, how: str, said: str
) -> None:
    error = _failure(launcher, 1, how)
    verdict = error.verdict
    assert (verdict.kind, verdict.rank, verdict.op) == ("stalled", 1, "all_reduce sum")
    assert said in verdict.what
    assert "[6] float32" in verdict.what  # what the others wait in
    assert "rank 0, 2 waited" in verdict.what
    assert verdict.stack is not None
    top = verdict.stack.splitlines()[0]
    # A stopped process goes on for a moment to tell its stack, and may have returned by then.
    where = r" in _misbehave$| in misbehaves$" if how == "SIGSTOP" else r" in _misbehave$"
    assert re.search(where, top), top
    assert verdict.stack in str(error)


@pytest.mark.slice(1)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("how", "called"),
    [("skip", "all_reduce sum [4]"), ("shape", "all_reduce sum [9]"), ("op", "barrier")],
)
def test_a_rank_that_calls_something_else_is_named_with_both(
    launcher: Launcher, how: str, called: str, n: int
) -> None:
    verdict = _failure(launcher, 1, how, n).verdict
    assert (verdict.kind, verdict.rank, verdict.op) == ("diverged", 1, "all_reduce sum")
    assert f"rank 1 of {n} called {called}" in verdict.what
    assert "called all_reduce sum [6] float32 (collective 4)" in verdict.what


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("SIGKILL", "died", "was ended by SIGKILL"),
        ("exit", "died", "ended with exit code 0 before its work was done"),
        ("raise", "error", "ValueError: the cause"),
    ],
)
def test_a_rank_that_ends_is_named_with_its_last_collective(
    launcher: Launcher, how: str, kind: str, said: str
) -> None:
    error = _failure(launcher, 1, how)
    verdict = error.verdict
    assert (verdict.kind, verdict.rank, verdict.op) == (kind, 1, "all_reduce sum")
    assert said in str(error)
    assert [account.events[-1].shape for account in error.accounts] == [(6,), (5,), (6,)]


def test_ranks_that_agree_are_left_alone(launcher: Launcher) -> None:
    found = launcher.run(entries.misbehaves, (0, "no"), n_processes=2, timeout_s=TIMEOUT_S)
    assert found == [[2.0] * 6] * 2


@pytest.mark.parametrize(
    ("error", "rank", "op"),
    [
        (RunError("a full disk", rank=1, op="save"), 1, "save"),
        (RunError("all skipped"), None, None),
        (ConfigError([Violation(path="resume", value="x", rule="is", legal="y")]), None, None),
    ],
    ids=["named", "of nobody", "of the input"],
)
def test_what_all_raise_is_blamed_on_whom_it_names(
    launcher: Launcher, error: PolyremeError, rank: int | None, op: str | None
) -> None:
    with pytest.raises(type(error)):
        launcher.run(entries.raise_together, (error,), n_processes=3)
    assert launcher.outcome is not None
    verdict = launcher.outcome.verdict
    assert verdict == Verdict(kind="error", rank=rank, op=op, what=str(error))


def test_what_one_rank_raises_is_blamed_on_it(launcher: Launcher) -> None:
    with pytest.raises(RunError, match="alone"):
        launcher.run(entries.raises_on, (1, RunError("alone")), n_processes=2)
    assert launcher.outcome is not None
    assert launcher.outcome.verdict is not None
    assert launcher.outcome.verdict.rank == 1


def test_ranks_that_find_a_difference_themselves_name_it(launcher: Launcher) -> None:
    with pytest.raises(RankFailed) as caught:
        launcher.run(entries.calls_more_than_others, (1,), n_processes=3)
    verdict = caught.value.verdict
    assert (verdict.kind, verdict.rank, verdict.op) == ("diverged", 1, "barrier")
    assert (caught.value.rank, verdict.stack) == (1, None)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.slice("True")
def test_a_disk_slower_than_the_time_limit_is_no_stall(
    launcher: Launcher, tmp_path: Path, fails: bool
) -> None:
    args = (tmp_path, 2.5, 1.0, fails)
    if not fails:
        found = launcher.run(entries.saves_on_a_slow_disk, args, n_processes=2, timeout_s=1.0)
        assert found == ["done", "done"]
        return
    with pytest.raises(RunError, match=r"step 1 failed on rank 0: .*No space left"):
        launcher.run(entries.saves_on_a_slow_disk, args, n_processes=2, timeout_s=1.0)


def _others_trail(world) -> str:
    if world.rank == 1:
        world.record.begin("all_reduce sum", torch.zeros(3), 3)
    else:
        world.record.begin("all_gather", torch.zeros(3), 3)
    return str(diverged(world))


def test_differing_trails_are_told_apart_by_the_first_difference(pool) -> None:
    found = pool(3).run(_others_trail)
    assert len(set(found)) == 1
    assert "rank 1 of 3 called all_reduce sum [3] float32" in found[0]
    assert "where rank 0, 2 called all_gather [3] float32" in found[0]


def _one_more(world, rank: int) -> float:
    """A training run in which one rank notes a collective that the others do not."""
    from polyreme.runtime import loop
    from tiny import Case

    case = Case(plan={"replica": 2}, steps=3)
    asked = []

    def stop() -> bool:
        asked.append(1)
        if len(asked) == 2 and world.rank == rank:
            world.record.begin("all_gather", None, 2)
        return False

    return loop.train(case.job(), world, stop=stop).final_loss


def test_a_run_whose_ranks_call_different_collectives_fails_on_all(pool) -> None:
    for failure in pool(2).outcomes(_one_more, 1):
        assert isinstance(failure.error, RunError)
        assert "rank 1 of 2 called all_gather" in str(failure.error)


def test_a_trail_is_the_same_in_every_process_and_not_for_other_calls(pool) -> None:
    calls = [("a", (2,), torch.float32), ("a", (3,), torch.float32), ("b", (2,), torch.float32)]
    calls += [("a", (2,), torch.float64)]
    trails = set(pool(2).run(_trail, calls))
    assert len(trails) == 1
    singles = {_trail(None, [call]) for call in calls}
    assert len(singles) == len(calls)
    assert _trail(None, calls[:2]) != _trail(None, calls[1::-1])


def _trail(world, calls) -> int:
    record = Record()
    for op, shape, dtype in calls:
        record.begin(op, torch.zeros(shape, dtype=dtype), 2)
    assert float(record.trail) == record.trail < 2**53
    return record.trail


def test_an_event_that_is_just_being_written_is_left_out(tmp_path: Path) -> None:
    record = Record(tmp_path / "0.record")
    for _ in range(2):
        record.begin("all_gather", torch.zeros(3), 2)
    raw = (tmp_path / "0.record").read_bytes()
    whole = b"float32\t2\t3"
    at = raw.rindex(whole)
    for torn in (b"float32\t2", b"float32\t\t3", b"float32\t2\tx"):
        cut = raw[:at] + torn.ljust(len(whole), b"\0") + raw[at + len(whole) :]
        (tmp_path / "cut").write_bytes(cut)
        assert [event.seq for event in read(tmp_path / "cut", 0).events] == [1]


class Shared:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set_timeout(self, timeout: object) -> None:
        """Nothing waits."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.values.setdefault(key, desired.encode())


def test_records_of_hosts_that_share_a_name_are_kept_apart(tmp_path: Path) -> None:
    store, boots = Shared(), (tmp_path / "a", tmp_path / "b")
    for boot in boots:
        boot.write_text(boot.name)
    first, second, again = (home(store, boot) for boot in (*boots, boots[0]))
    assert first == again != second
    first.rmdir()
    second.rmdir()


def test_the_last_watchdog_of_a_host_leaves_nothing_behind() -> None:
    store = Shared()
    box = home(store)
    dogs = [
        Watchdog(store, box, Record(box / f"{rank}.record", rank), 2, 600.0) for rank in range(2)
    ]
    dogs[1].close()
    assert sorted(path.name for path in box.iterdir()) == ["0.record", "0.stack"]
    dogs[0].close()
    assert not box.exists()


def test_a_rank_with_an_error_leaves_the_last_word_to_the_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped rank that was woken for its stack told of a second fault, its own."""
    monkeypatch.setattr(Watchdog, "_end", lambda self: self._ended.set())
    store = Shared()
    box = home(store)
    dog = Watchdog(store, box, Record(box / "0.record", 0), 2, 600.0)
    dog.give_way()
    assert not dog._ended.is_set()  # nobody has raised an alarm: it goes on at once
    store.set("alarm", "1")
    dog.give_way()
    assert dog._ended.is_set()  # by the judgement, which ends a real rank
    dog.close()


def test_a_record_is_read_by_others_and_keeps_the_last(tmp_path: Path) -> None:
    record = Record(tmp_path / "3.record", 3)
    for _ in range(N_SLOTS + 5):
        with record.inside("barrier", n_ranks=2):
            pass
    with record.doing("saving"):
        seq = record.begin("all_reduce sum", torch.zeros(2, 0, dtype=torch.bfloat16), 2)
        record.wait(seq)
        found = read(tmp_path / "3.record", 3)
        assert waiting(tmp_path / "3.record") == (seq, "starting")
    assert (found.rank, found.pid, found.state) == (3, os.getpid(), "running")
    assert (found.doing, found.seq, found.waiting) == ("saving", seq, seq)
    assert [event.seq for event in found.events] == list(range(seq - N_SLOTS + 1, seq + 1))
    last = found.events[-1]
    assert (last.op, last.shape, last.dtype, last.end_s) == (
        "all_reduce sum",
        (2, 0),
        "bfloat16",
        None,
    )
    assert all(event.end_s is not None for event in found.events[:-1])
    assert read(tmp_path / "4.record", 4).doing == "starting"
    assert waiting(tmp_path / "4.record") == (0, "starting")


def test_behind_the_host_a_rank_stands_in_its_newest_until_it_has_waited(tmp_path: Path) -> None:
    path = tmp_path / "0.record"
    record = Record(path)
    record.lags = True
    first = record.begin("all_reduce sum", None, 2)
    assert waiting(path)[0] == first
    with record.inside("all_gather", None, 2, settles=False):
        pass
    record.end(first)
    assert waiting(path)[0] == first + 1
    with record.inside("all_reduce sum", None, 2):
        pass
    assert waiting(path)[0] == 0


def _account(rank: int, seq: int, waits: int = 0, **more) -> Account:
    events = tuple(
        Event(seq=n, op=f"op {n}", shape=(), dtype="", n_ranks=2, start_s=n, end_s=n + 0.5)
        for n in range(1, seq + 1)
    )
    return Account(rank=rank, state="running", seq=seq, waiting=waits, events=events, **more)


def test_on_devices_that_run_behind_the_one_that_gave_less_is_late() -> None:
    """There ranks stand still only where a step ends, many collectives after the missing one."""
    verdict = stall([_account(0, 9, waits=9), _account(1, 4), _account(2, 9, waits=9)], 1.0)
    assert (verdict.rank, verdict.op) == (1, "op 5")


def test_where_all_stand_in_the_same_the_stack_tells() -> None:
    inside = 'File "distributed_c10d.py", line 1 in all_reduce'
    accounts = [_account(rank, 3, waits=3, stack=inside) for rank in range(2)]
    assert stall(accounts, 1.0).rank is None
    accounts[0] = _account(0, 3, waits=3, stack='File "disk.py", line 1 in write')
    assert stall(accounts, 1.0).rank == 0


def test_last_events_are_kept_as_json() -> None:
    accounts = [_account(1, 2), _account(0, 100, waits=100)]
    verdict = stall(accounts, 1.0)
    told = json.loads(attempt_json(4, verdict, accounts))
    assert told["attempt"] == 4
    assert told["verdict"]["rank"] == 1
    assert [len(rank["events"]) for rank in told["ranks"]] == [64, 2]
    assert told["ranks"][0]["events"][-1] == {
        "seq": 100,
        "op": "op 100",
        "shape": [],
        "dtype": "",
        "start_s": pytest.approx(told["ranks"][0]["events"][0]["start_s"] + 63),
        "end_s": pytest.approx(told["ranks"][0]["events"][0]["end_s"] + 63),
    }
