"""The record of a run: one stream of events in ``log.jsonl``, and ``summary.json`` at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

Status = Literal["done", "interrupted", "failed"]


class StepEvent(msgspec.Struct, frozen=True, kw_only=True, tag="step", tag_field="kind"):
    """One optimizer step, written by the first process.

    Seconds are means over processes: `compute_s` not blocked on others, `wait_s` blocked because
    another process was slower, `comm_s` blocked for the communication itself; they add up to
    `step_s`. `wire_bytes` is what one process sent. `memory_bytes` is the highest peak of any
    device so far. A step that was not finite has `skipped`, a `reason` and the `rank`.
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
    wire_bytes: int
    memory_bytes: int
    skipped: bool = False
    reason: str | None = None
    rank: int | None = None


class EvalEvent(msgspec.Struct, frozen=True, kw_only=True, tag="eval", tag_field="kind"):
    """Metrics of the held-out samples after a step, by name."""

    t: float
    attempt: int
    step: int
    metrics: Mapping[str, float]


class CheckpointEvent(
    msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint", tag_field="kind"
):
    """A checkpoint became the newest; `seconds` is how long training stood still for it."""

    t: float
    attempt: int
    step: int
    path: str
    seconds: float


class FaultEvent(msgspec.Struct, frozen=True, kw_only=True, tag="fault", tag_field="kind"):
    """Something went wrong: what, on which rank (if known), in which operation."""

    t: float
    attempt: int
    what: str
    rank: int | None = None
    op: str | None = None


class RestartEvent(msgspec.Struct, frozen=True, kw_only=True, tag="restart", tag_field="kind"):
    """An attempt began: from which step, on how many devices."""

    t: float
    attempt: int
    step: int
    devices: int


Event = StepEvent | EvalEvent | CheckpointEvent | FaultEvent | RestartEvent


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``summary.json``: what a run came to. Names are a contract with outside readers."""

    status: Status
    steps: int
    samples: int
    tokens: int
    seconds: float
    final_loss: float | None
    metrics: Mapping[str, float]
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


class Writer:
    """Appends events to a file as they come, each line flushed."""

    def __init__(self, path: Path, *, attempt: int = 0) -> None:
        self.attempt = attempt
        self._start_s = time.monotonic()
        self._encoder = msgspec.json.Encoder()
        self._file: IO[bytes] = path.open("ab")

    @property
    def t(self) -> float:
        """Seconds since this writer was made."""
        return time.monotonic() - self._start_s

    def write(self, event: Event) -> None:
        """Append one event."""
        self._file.write(self._encoder.encode(event) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path) -> Iterator[Event]:
    """Events of a ``log.jsonl`` in order; a cut last line (a killed run) ends the stream.

    Raises msgspec.DecodeError for a broken line that is not the last.
    """
    decoder = msgspec.json.Decoder(Event)
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            event = decoder.decode(line)
        except msgspec.DecodeError:
            if number == len(lines) - 1:
                return
            raise
        yield event
