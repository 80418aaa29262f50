"""`polyreme train` in processes of its own, or as one of those that a launcher made."""

from __future__ import annotations

import dataclasses
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec

from .. import runlog
from .. import spec as specs
from ..errors import PolyremeError, RunError
from ..plan import store as plans
from ..plan.ir import Plan
from ..runtime.launch import PRELOAD, Launcher
from ..runtime.place import is_launched, launch_name, n_restarts, read_place
from ..runtime.record import Account
from ..runtime.verdict import Verdict, named
from ..summary import with_effectiveness
from . import folders, hostile, steps

_PRELOAD = ("polyreme.api.ranks",)


def train(
    spec: specs.Spec,
    folder: Path,
    *,
    devices: int | None,
    plan: str | Path | Plan | None,
    resume: str | None,
    progress: bool,
    attack: bool = False,
) -> runlog.Summary | None:
    """See `api.train`."""
    start_s = time.time()
    named = plan or spec.parallel.plan
    given = plans.load(Path(named)) if isinstance(named, str | Path) else named
    folders.refuse_absent(resume)
    steps.refuse_unlike(spec)
    spec = hostile.attacked(spec, devices, given) if attack else hostile.spared(spec)
    if is_launched() and not spec.data_parallel.sync.n_servers(1):
        with folders.claimed(folder) if read_place().rank == 0 else nullcontext():
            return _join(spec, folder, given, resume, progress, start_s)
    if spec.data_parallel.sync.n_servers(1):
        from . import serving

        return serving.train(spec, folder, devices=devices, resume=resume, progress=progress)
    preload = (*PRELOAD, *_PRELOAD, *spec.imports)
    with folders.claimed(folder), Launcher(preload=preload) as launcher:
        return _launch(launcher, spec, folder, devices, given, resume, progress, start_s)


def _launch(
    launcher: Launcher,
    spec: specs.Spec,
    folder: Path,
    devices: int | None,
    plan: Plan | None,
    resume: str | None,
    progress: bool,
    start_s: float,
) -> runlog.Summary:
    from . import starting
    from .aftermath import conclude, say_saved
    from .attempts import Attempts
    from .problem import here
    from .ranks import Request

    cluster, accelerator = here(spec, devices)
    start = starting.begin(resume, folder, uuid.uuid4().hex)
    request = Request(
        spec=spec,
        cluster=cluster,
        accelerator=accelerator,
        folder=folder,
        plans=() if plan is None else (plan,),
        start=start,
        resume=start.first,
        progress=progress,
        all_devices=steps.number_is_asked(spec, devices, accelerator),
        start_s=start_s,
    )
    logs = folder.parent / f".{folder.name}.ranks"
    attempts = Attempts(launcher, request, logs)
    try:
        attempts.run()
    except (PolyremeError, KeyboardInterrupt) as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if attempts.begun:
            if isinstance(error, PolyremeError):
                # The page takes seconds; who is to blame is said before.
                sys.stderr.write(f"polyreme: {error}\n")
                error.said = True
                attempts.note(error)
            else:
                say_saved(folder)
            status: runlog.Status = "interrupted" if interrupted else "failed"
            conclude(spec, folder, status, attempts.machines)
        raise
    finally:
        folders.take_logs(logs, folder)
    return judged(spec, folder)


def _join(
    spec: specs.Spec,
    folder: Path,
    plan: Plan | None,
    resume: str | None,
    progress: bool,
    start_s: float,
) -> runlog.Summary | None:
    """One rank of a launcher's; the first writes the report, or why the run broke off.

    One that the launcher started again goes on with the run that it began.
    """
    from . import starting
    from .aftermath import conclude, next_attempt, note
    from .problem import here
    from .ranks import Request, work

    cluster, accelerator = here(spec, None)
    if plan is not None:
        steps.fills(plan, cluster)
    launch = launch_name()
    request = Request(
        spec=spec,
        cluster=cluster,
        accelerator=accelerator,
        folder=folder,
        plans=() if plan is None else (plan,),
        start=starting.Start(launch=launch),  # until rank 0 has looked
        progress=progress,
        all_devices=True,
        start_s=start_s,
    )

    def begin(request: Request) -> Request:
        begun = starting.begun(folder, launch) if n_restarts() else None
        if begun is not None:
            return dataclasses.replace(request, start=begun, resume=begun.again(folder), again=True)
        start = starting.begin(resume, folder, launch)
        return dataclasses.replace(request, start=start, resume=start.first)

    def settle(what: str, verdict: Verdict, accounts: Sequence[Account]) -> None:
        if starting.begun(folder, launch) is not None:
            note(folder, max(0, next_attempt(folder) - 1), what, verdict, accounts)
            conclude(spec, folder, "failed", (cluster, accelerator))

    try:
        found = work(
            request,
            lambda verdict, accounts: settle(verdict.what, verdict, accounts),
            begin,
        ).summary
    except (PolyremeError, RuntimeError) as error:
        if read_place().rank == 0:
            settle(str(error), named(error), ())
        raise
    return None if found is None else judged(spec, folder)


def judged(spec: specs.Spec, folder: Path) -> runlog.Summary:
    """The summary with effectiveness against the reference, if there is one; makes the report.

    A run that goes on while the disk is full does without what finds no room, and says so.
    """
    from ..report.against import against, parse_target
    from ..report.page import render
    from ..report.runs import read_run
    from .aftermath import say_saved

    found = msgspec.json.decode((folder / "summary.json").read_bytes(), type=runlog.Summary)
    options, reference = spec.report, None
    if options.reference is not None and options.target is not None:
        reference = Path(options.reference)
        goal = parse_target(options.target)
        effectiveness = against(read_run(folder), read_run(reference), goal).effectiveness
        if effectiveness is not None:
            found = with_effectiveness(found, effectiveness)
            runlog.save_summary(found, folder)
    try:
        render([folder], folder / "report.html", reference=reference, target=options.target)
    except RunError as error:
        if spec.train.on_save_error == "stop":
            raise
        sys.stderr.write(f"polyreme: {error}\n")
    if found.status == "interrupted":
        say_saved(folder)
    return found
