"""The record of a run: one stream of events in ``log.jsonl``, and ``summary.json`` at its end."""

from __future__ import annotations

import errno
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from .errors import RunError

_BLOCK_BYTES = 2**16
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
Status = Literal["done", "interrupted", "failed"]


class StepEvent(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One optimizer step, written by the first process.

    `step` counts from 1. `samples`, `tokens`, seconds and `wire_bytes` are of this step alone.
    Seconds are means over processes: `compute_s` not blocked on others, `wait_s` blocked because
    another process was slower, `comm_s` blocked for the communication itself; they add up to
    `step_s`. `hidden_s` is communication behind computation, a part of `compute_s`. `wire_bytes`
    is what one process sent. `memory_bytes` is the highest peak of any device so far. A step that
    was not finite has `skipped`, a `reason`, the `ranks` to blame if any are, and the first of
    them as `rank`. `sample_ids` are listed if asked for, in the order of the global batch.
    `delays` says of each delay how many of the step's gradients had it, where workers do not wait:
    how many others were applied between the parameters of a gradient and itself. `suspects` are
    workers that a robust aggregate set aside, or that stood farthest from it. `objective`, `gap`
    and `gradient` are of a linear model before the step, or of one alike: the whole objective, by
    how much it may be above its optimum, and the largest entry of w - prox(w - g). `passes` are
    local steps over the samples of a worker, where a sync chooses them.
    """

    t: float
    attempt: int
    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    samples: int
    tokens: int
    step_s: float
    compute_s: float
    comm_s: float
    wait_s: float
    hidden_s: float = 0.0
    wire_bytes: int
    memory_bytes: int
    skipped: bool = False
    reason: str | None = None
    rank: int | None = None
    ranks: tuple[int, ...] | None = None
    sample_ids: tuple[int, ...] | None = None
    delays: Mapping[int, int] | None = None
    suspects: tuple[int, ...] | None = None
    objective: float | None = None
    gap: float | None = None
    gradient: float | None = None
    passes: float | None = None

    @property
    def blamed(self) -> tuple[int, ...]:
        """All ranks to blame, also in a log that names only the first."""
        if self.ranks is not None:
            return self.ranks
        return () if self.rank is None else (self.rank,)


class EvalEvent(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="kind"):
    """Metrics of the held-out samples after a step, by name."""

    t: float
    attempt: int
    step: int
    metrics: Mapping[str, float | None]  # null where not finite


class DelaysEvent(msgspec.Struct, frozen=True, kw_only=True, tag="delays", tag_field="kind"):
    """Delays of all gradients that this attempt applied up to a step, by worker.

    Of each worker that pushed it says of each delay how many of its gradients had it.
    """

    t: float
    attempt: int
    step: int
    by_worker: Mapping[int, Mapping[int, int]]


class SuspectsEvent(msgspec.Struct, frozen=True, kw_only=True, tag="suspects", tag_field="kind"):
    """How often a robust aggregate of this attempt named workers as suspects, up to a step.

    `named` counts the steps in which it named any, `by_worker` those in which it named each.
    """

    t: float
    attempt: int
    step: int
    named: int
    by_worker: Mapping[int, int]


class Anchor(msgspec.Struct, frozen=True, kw_only=True):
    """How a partition of rows looks from an anchor a, `at` times the final model w.

    `constant` bounds l(a) / |a - w|^2 from below, and `distance` is |a - w|. `promised` is how far
    workers' own problems together fall from a over how far the objective can, at least: 1 where
    all see the same.
    """

    at: float
    distance: float
    constant: float
    promised: float | None


class PartitionEvent(msgspec.Struct, frozen=True, kw_only=True, tag="partition", tag_field="kind"):
    """How good the partition of a linear model's rows over workers is, at the end of a run.

    `constant` is the largest of the anchors': a bound from below of pSCOPE's constant.
    """

    t: float
    attempt: int
    step: int
    constant: float
    anchors: tuple[Anchor, ...]


class CheckpointEvent(
    msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint", tag_field="kind"
):
    """A checkpoint became the newest.

    `seconds` is how long training stood still for it, `write_s` how long it took in all.
    """

    t: float
    attempt: int
    step: int
    path: str
    seconds: float
    write_s: float | None = None


class FaultEvent(msgspec.Struct, frozen=True, kw_only=True, tag="fault", tag_field="kind"):
    """Something went wrong: what, on which rank (if known), in which operation, where in Python."""

    t: float
    attempt: int
    what: str
    rank: int | None = None
    op: str | None = None
    stack: str | None = None


class RestartEvent(msgspec.Struct, frozen=True, kw_only=True, tag="restart", tag_field="kind"):
    """An attempt began: from which step, on how many devices."""

    t: float
    attempt: int
    step: int
    devices: int


Event = (
    StepEvent
    | EvalEvent
    | DelaysEvent
    | SuspectsEvent
    | PartitionEvent
    | CheckpointEvent
    | FaultEvent
    | RestartEvent
)


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """Of a `PartitionEvent`."""

    constant: float
    anchors: tuple[Anchor, ...]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``: what a run came to. Names are a contract with outside readers."""

    status: Status
    steps: int
    samples: int
    tokens: int
    seconds: float
    final_loss: float | None
    metrics: Mapping[str, float | None]  # null where not finite
    step_s_median: float | None
    throughput: float | None  # samples per second over the median step
    mfu: float | None
    wire_bytes: int
    predicted: Mapping[str, Any]  # {"step_s": float, "peak_bytes": {cause: bytes}}
    measured: Mapping[str, Any]
    w: float | None
    utilisation: float | None
    effectiveness: float
    goodput: float
    basis: Mapping[str, str]  # one of peak, measured, reference, assumed per factor
    workers: int
    devices: int
    versions: Mapping[str, str]
    hardware: str
    partition: Partition | None = None


class Writer:
    """Appends events to a file as they come, each at once.

    A file that exists is gone on with: the line that a killed run cut is removed, the attempt is
    the next one and the clock runs on from the last event. So the log of a resumed run drops no
    event, and neither attempts nor seconds go back. `began_s` (``time.time``) is when this attempt
    began if that was earlier, so that its start-up counts. `listeners` are told of every event.
    `clock` gives the seconds that pass, where they are not those of this machine.

    While the disk is full events are held back and written once there is room, in order.
    """

    def __init__(
        self,
        path: Path,
        *,
        attempt: int | None = None,
        began_s: float | None = None,
        listeners: Sequence[Callable[[Event], None]] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        last = _mend(path)
        self.attempt = attempt if attempt is not None else last.attempt + 1
        before_s = 0.0 if began_s is None else max(0.0, time.time() - began_s)
        self._clock = clock
        self._start_s = self._now_s() - last.t - before_s
        self._encoder = msgspec.json.Encoder()
        self._listeners = tuple(listeners)
        self._file: IO[bytes] = path.open("ab", buffering=0)
        self._held = bytearray()
        self._refusal = OSError(errno.ENOSPC, "the disk is full")

    @property
    def t(self) -> float:
        """Seconds since the run's first attempt began, without the time between attempts."""
        return self._now_s() - self._start_s

    def _now_s(self) -> float:
        return time.monotonic() if self._clock is None else self._clock()

    def write(self, event: Event) -> None:
        """Append one event, and tell it to the listeners."""
        self._held += self._encoder.encode(event) + b"\n"
        self._write_held()
        for listener in self._listeners:
            listener(event)

    def close(self) -> None:
        """Close the file. Raises RunError if the disk left no room for all events."""
        self._write_held()
        self._file.close()
        if self._held:
            left = room(self._refusal, Path(self._file.name).absolute().parent)
            n_lost = self._held.count(b"\n")
            raise RunError(
                f"{self._file.name}: {self._refusal.strerror}; it needs {len(self._held):,} bytes, "
                f"{left}; the last {n_lost} events are missing in it"
            )

    def _write_held(self) -> None:
        try:
            while self._held:
                del self._held[: self._file.write(self._held)]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._refusal = error


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What every event has."""

    t: float = 0.0
    attempt: int = -1


def _mend(path: Path) -> _Mark:
    """Cut what follows the last whole line; that line's time and attempt."""
    if not path.exists():
        return _Mark()
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        start = size
        tail = b""
        while start and tail.rstrip(b"\n").count(b"\n") < 2:
            step = min(_BLOCK_BYTES, start)
            start -= step
            file.seek(start)
            tail = file.read(step) + tail
        whole = tail[: tail.rfind(b"\n") + 1]
        file.truncate(start + len(whole))
    lines = whole.split()
    return msgspec.json.decode(whole.splitlines()[-1], type=_Mark) if lines else _Mark()


def read(path: Path) -> Iterator[Event]:
    """Events of a ``log.jsonl`` in order; a cut last line (a killed run) ends the stream.

    Raises msgspec.DecodeError for a broken line that is not the last.
    """
    decoder = msgspec.json.Decoder(Event)
    with path.open("rb") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                event = decoder.decode(line)
            except msgspec.DecodeError:
                if not line.endswith(b"\n"):
                    return
                raise
            yield event


def save_summary(summary: Summary, folder: Path) -> Path:
    """Write ``summary.json`` into a run folder; RunError on a full disk."""
    return write_whole(
        folder / "summary.json", msgspec.json.format(msgspec.json.encode(summary)) + b"\n"
    )


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file that appears whole or not at all. Raises RunError on a full disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(content)
        return partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        if error.errno not in FULL:
            raise
        left = room(error, path.parent)
        raise RunError(
            f"{path}: {error.strerror}; it needs {len(content):,} bytes, {left}"
        ) from error


def room(error: OSError, folder: Path, more_bytes: int = 0) -> str:
    """What the folder had room for where a write was refused, in words that follow the need.

    Bytes that are free, and `more_bytes` that were; or the limit on one file.
    """
    free = shutil.disk_usage(folder).free + more_bytes
    return size_limit(error) or f"{free:,} are free"


def size_limit(error: OSError) -> str | None:
    """The limit on one file that a write ran into, and the way out; None: it was something else."""
    if error.errno != errno.EFBIG:
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return "more than this file system takes in one file: use another"
    return f"one file may have {limit:,}: raise the file size limit (ulimit -f unlimited)"


def histogram(delays: Iterable[int]) -> dict[int, int]:
    """How often each occurs, the shortest first."""
    return dict(sorted(Counter(delays).items()))
