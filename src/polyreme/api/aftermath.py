"""What a run that broke off leaves behind: the fault, the last events of every rank, a report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .. import runlog
from .. import spec as specs
from ..cluster.accelerator import Accelerator
from ..cluster.types import Cluster
from ..errors import PolyremeError, RunError
from ..plan import store as plans
from ..runtime import checkpoints
from ..runtime.record import Account
from ..runtime.verdict import Verdict, attempt_json
from . import folders


def note(
    folder: Path, attempt: int, what: str, verdict: Verdict | None, accounts: Sequence[Account]
) -> None:
    """Write the fault of an attempt into the log, and ``ranks/attempt-A.json``.

    The log's clock has run on since its last event. What a full disk does not take is said.
    """
    try:
        _note(folder, attempt, what, verdict, accounts)
    except (OSError, RunError) as error:
        sys.stderr.write(f"polyreme: {error}; not written: {what}\n")


def _note(
    folder: Path, attempt: int, what: str, verdict: Verdict | None, accounts: Sequence[Account]
) -> None:
    log = folder / folders.LOG
    began_s = log.stat().st_mtime if log.exists() else None
    writer = runlog.Writer(log, attempt=attempt, began_s=began_s)
    writer.write(
        runlog.FaultEvent(
            t=writer.t,
            attempt=attempt,
            what=what,
            rank=None if verdict is None else verdict.rank,
            op=None if verdict is None else verdict.op,
            stack=None if verdict is None else verdict.stack,
        )
    )
    writer.close()
    if accounts:
        home = folder / "ranks"
        home.mkdir(exist_ok=True)
        (home / f"attempt-{attempt}.json").write_bytes(attempt_json(attempt, verdict, accounts))


def next_attempt(folder: Path) -> int:
    """The number of the attempt that goes on with the run in a folder."""
    log = folder / folders.LOG
    attempts = [event.attempt for event in runlog.read(log)] if log.exists() else []
    return max(attempts, default=-1) + 1


def say_saved(folder: Path) -> None:
    """Say of a run that was asked to end where it can be gone on with, if it can."""
    newest = checkpoints.newest(folder)
    if newest is not None:
        sys.stderr.write(
            f"polyreme: {newest.name} is saved in {newest.parent}; "
            "the same command with --resume auto goes on from it\n"
        )


def conclude(
    spec: specs.Spec,
    folder: Path,
    status: runlog.Status,
    machines: tuple[Cluster, Accelerator],
    *,
    virtual: bool = False,
) -> None:
    """The summary and the report of a run whose first rank could not write them.

    A run that had done nothing yet gets none, and one that was asked to end after it had written
    its summary keeps that. What cannot be written is said.
    """
    from ..report.page import render

    log = folder / folders.LOG
    if not log.exists() or not any(runlog.read(log)):
        return
    what = "no summary or report was made"
    try:
        if status == "failed" or not (folder / "summary.json").exists():
            _summarise(spec, folder, status, machines, virtual)
        what = "no report was made"
        render([folder], folder / "report.html")
    except (OSError, PolyremeError) as error:  # the one that ended the run is the one to raise
        sys.stderr.write(f"polyreme: {what}: {error}\n")


def _summarise(
    spec: specs.Spec,
    folder: Path,
    status: runlog.Status,
    machines: tuple[Cluster, Accelerator],
    virtual: bool,
) -> None:
    from ..summary import Setting, summarise
    from .problem import pose
    from .steps import kept_profile

    problem = pose(spec, machines=machines)
    plan = plans.load(folder / folders.PLAN)
    setting = Setting(
        graph=problem.graph,
        plan=plan,
        cluster=problem.cluster,
        profile=None if virtual else kept_profile(problem),
    )
    found = summarise(runlog.read(folder / folders.LOG), setting, status=status, virtual=virtual)
    runlog.save_summary(found, folder)
