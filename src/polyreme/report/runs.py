"""A run folder as the report reads it: whatever is there, and in words what is not."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, Violation
from ..plan import store
from ..plan.ir import Plan
from ..runlog import (
    CheckpointEvent,
    DelaysEvent,
    EvalEvent,
    Event,
    FaultEvent,
    RestartEvent,
    StepEvent,
    Summary,
    SuspectsEvent,
)
from .ranks import Last, read_ranks


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run folder.

    Times of events count from the first attempt on: an attempt whose clock starts anew follows
    the last event of the one before. `plan_json` is ``plan.json`` as it stands (it may hold
    ``top``), `profile` ``profile.json`` as it stands. `ranks` tells what
    ranks did last in attempts that broke off, `missing` says what could not be read.
    """

    folder: Path
    name: str
    spec: Mapping[str, Any]
    spec_text: str
    plan: Plan | None
    plan_json: Mapping[str, Any]
    profile: Mapping[str, Any]
    summary: Summary | None
    steps: tuple[StepEvent, ...]
    evals: tuple[EvalEvent, ...]
    delays: tuple[DelaysEvent, ...] = ()
    suspects: tuple[SuspectsEvent, ...] = ()
    checkpoints: tuple[CheckpointEvent, ...]
    faults: tuple[FaultEvent, ...]
    restarts: tuple[RestartEvent, ...]
    ranks: tuple[Last, ...] = ()
    missing: tuple[str, ...]
    written: datetime | None

    @property
    def status(self) -> str:
        """What the summary says; ``unfinished`` where there is none (killed, or still running)."""
        return self.summary.status if self.summary else "unfinished"

    @property
    def simulated(self) -> bool:
        """Whether seconds are those of a virtual clock."""
        return self.summary is not None and _virtual(self.summary)

    @property
    def covered(self) -> tuple[int, ...]:
        """How many steps each step event stands for (``train.log_every`` thins them).

        A skipped step is always logged; others that are not are told by the next that is. A log
        whose first attempt went on from another run's checkpoint tells of no step before that.
        """
        counts: list[int] = []
        kept: list[StepEvent] = []  # that led to the step
        attempt, told, n_skipped = -1, 0, 0
        begun: int | None = None
        for event in self.steps:
            if event.attempt != attempt:
                starts = [e.step for e in self.restarts if attempt < e.attempt <= event.attempt]
                if begun is None:
                    begun = starts[-1] if starts else 0
                start = min(starts, default=event.step - 1)
                while kept and kept[-1].step > start:
                    kept.pop()
                whole = (e.step for e in reversed(kept) if not e.skipped)
                attempt, told = event.attempt, next(whole, begun)
                n_skipped = sum(e.step > told for e in kept)
            kept.append(event)
            if event.skipped:
                counts.append(1)
                n_skipped += 1
            else:
                counts.append(max(1, event.step - told - n_skipped))
                told, n_skipped = event.step, 0
        return tuple(counts)


def read_run(folder: Path) -> Run:
    """Read a run folder, complete or not.

    Raises ConfigError where the path is no folder, or holds neither spec, log nor summary.
    """
    kept = [folder / name for name in ("spec.toml", "log.jsonl", "summary.json")]
    if not any(path.is_file() for path in kept):
        rule = "holds no run" if folder.is_dir() else "is no folder"
        legal = "a folder with spec.toml, log.jsonl or summary.json, as `polyreme train` leaves it"
        raise ConfigError([Violation(path="run", value=str(folder), rule=rule, legal=legal)])
    missing: list[str] = []
    spec_text = _text(folder / "spec.toml", missing, "what was asked for is unknown")
    spec: Mapping[str, Any] = {}
    try:
        spec = tomllib.loads(spec_text)
    except tomllib.TOMLDecodeError as error:
        missing.append(f"spec.toml cannot be read ({error}); it is shown as it stands")
    plan_json = _json(folder / "plan.json", missing, "the plan cannot be drawn")
    at_profile = len(missing)
    profile = _json(folder / "profile.json", missing, "costs behind the plan are unknown")
    summary_json = _json(
        folder / "summary.json", missing, "the run was killed or goes on; totals are from its log"
    )
    summary = _summary(summary_json, missing)
    if summary is not None and _virtual(summary) and not (folder / "profile.json").exists():
        del missing[at_profile]  # the seconds of [simulate] stand in its place
    events = tuple(_events(folder / "log.jsonl", missing))
    dates = [path.stat().st_mtime for path in kept[1:] if path.is_file()]
    return Run(
        folder=folder,
        name=folder.resolve().name,
        spec=spec,
        spec_text=spec_text,
        plan=read_plan(plan_json, missing),
        plan_json=plan_json,
        profile=profile,
        summary=summary,
        steps=tuple(event for event in events if isinstance(event, StepEvent)),
        evals=tuple(event for event in events if isinstance(event, EvalEvent)),
        delays=tuple(event for event in events if isinstance(event, DelaysEvent)),
        suspects=tuple(event for event in events if isinstance(event, SuspectsEvent)),
        checkpoints=tuple(event for event in events if isinstance(event, CheckpointEvent)),
        faults=tuple(event for event in events if isinstance(event, FaultEvent)),
        restarts=tuple(event for event in events if isinstance(event, RestartEvent)),
        ranks=read_ranks(folder, missing),
        missing=tuple(missing),
        written=datetime.fromtimestamp(max(dates)).astimezone() if dates else None,
    )


def _virtual(summary: Summary) -> bool:
    return "simulated" in summary.basis.values()


def _text(path: Path, missing: list[str], consequence: str) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        missing.append(f"{path.name} is missing: {consequence}")
        return ""


def _json(path: Path, missing: list[str], consequence: str) -> Mapping[str, Any]:
    text = _text(path, missing, consequence)
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        missing.append(f"{path.name} cannot be read ({error}): {consequence}")
        return {}


def read_plan(plan_json: Mapping[str, Any], missing: list[str]) -> Plan | None:
    """A plan from its JSON; None, and a line in `missing`, where it is none."""
    if not plan_json:
        return None
    known = {key: plan_json[key] for key in Plan.__struct_fields__ if key in plan_json}
    try:
        return store.decode(msgspec.json.encode(known))
    except msgspec.DecodeError as error:
        missing.append(f"plan.json is no plan ({error}): it cannot be drawn")
        return None


def _summary(summary_json: Mapping[str, Any], missing: list[str]) -> Summary | None:
    if not summary_json:
        return None
    try:
        return msgspec.convert(summary_json, Summary)
    except msgspec.ValidationError as error:
        missing.append(f"summary.json is not as expected ({error}); totals are from the log")
        return None


def _events(path: Path, missing: list[str]) -> Iterator[Event]:
    """Every readable event; a resumed run appends after the cut line of the killed one."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        missing.append("log.jsonl is missing: no curve can be shown")
        return
    decoder = msgspec.json.Decoder(Event)
    attempt, last_s, offset_s, n_broken = 0, 0.0, 0.0, 0
    for line in lines:
        if not line:
            continue
        try:
            event = decoder.decode(line)
        except msgspec.DecodeError:
            n_broken += 1
            continue
        if event.attempt != attempt and event.t + offset_s < last_s:
            offset_s = last_s
        attempt = event.attempt
        last_s = max(last_s, event.t + offset_s)
        yield msgspec.structs.replace(event, t=event.t + offset_s) if offset_s else event
    if n_broken:
        missing.append(
            f"{n_broken} of the log's {len(lines)} lines cannot be read (a killed run cuts its "
            "last line) and are left out"
        )
