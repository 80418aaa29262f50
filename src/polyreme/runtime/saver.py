"""Writes checkpoints while training goes on.

At a save each rank copies its pieces to host memory; a thread writes them. How far a rank's
thread is goes to all ranks with the next steps' exchange (`Said.save`), so there is no collective
of its own and none that a dead or slow disk could hang in. When all have written, the first rank
completes the folder; when one has failed, all learn it in the same step.
"""

from __future__ import annotations

import contextlib
import enum
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import torch

from ..errors import RunError
from ..graph.layer import LayerGraph
from ..runlog import CheckpointEvent, FaultEvent, Writer, room
from . import checkpoint, checkpoints, pieces
from .checkpoint import Meta
from .mesh import World
from .parted import dealt
from .state import State
from .synced import sync_folder, write_synced

_SHARED_WAIT_S = 5.0  # network file systems show a new folder late
_SAY_S = 5.0  # after so long in vain it is said what is waited for
Metrics = Mapping[str, float | None]


class Stage(enum.IntEnum):
    """How far a rank is with its part of a checkpoint."""

    IDLE = 0
    WRITING = 1
    WRITTEN = 2
    COMPLETE = 3
    FAILED = 4


def together(stages: Sequence[float]) -> Stage:
    """How far processes are that speak with one voice: all as far as the last, or failed."""
    found = [Stage(int(stage)) for stage in stages]
    if Stage.FAILED in found:
        return Stage.FAILED
    return Stage.COMPLETE if Stage.COMPLETE in found else min(found)


class Saving(Protocol):
    """What the loop asks of whoever keeps its checkpoints; all ranks call each method together."""

    @property
    def stage(self) -> int:
        """What to tell the others."""

    def begin(self, state: State, metrics: Metrics) -> None:
        """Save the state as it is now; `metrics` were measured of it."""

    def heard(self, stages: Sequence[int]) -> None:
        """What all ranks said their stage was."""

    def finish(self) -> int | None:
        """Wait until the checkpoint under way is complete, or has failed.

        The step of the newest one that this run completed.
        """


class Saver:
    """Saves into ``checkpoints/`` of a run folder. All ranks make one together.

    `keep` newest checkpoints stay, and the one with the best value of the metric `best`. A failed
    save raises RunError on all ranks, or is logged, as `on_error` says; the checkpoint before it
    stays. `settings` go into its meta data, `log` (rank 0) is told. However long writing takes,
    no rank waits for another nearly as long as `timeout_s`.
    """

    def __init__(
        self,
        run_folder: Path,
        graph: LayerGraph,
        world: World,
        *,
        keep: int,
        best: str | None = None,
        on_error: Literal["stop", "continue"] = "stop",
        settings: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
        log: Writer | None = None,
    ) -> None:
        self._run_folder = run_folder
        self._settings = settings
        self._home = run_folder / "checkpoints"
        self._graph, self._world = graph, world
        self._keep, self._best, self._on_error = keep, best, on_error
        self._log = log if world.is_first else None
        self._look_s = min(1.0, timeout_s / 4)
        self._shared_wait_s = min(_SHARED_WAIT_S, timeout_s / 2)
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._stage = Stage.IDLE
        self._error: BaseException | None = None
        self._meta: Meta | None = None
        self._saved: int | None = None
        self._needed_bytes = 0
        self._began_s = self._still_s = 0.0
        self._token = self._open()

    @property
    def stage(self) -> int:
        """What to tell the others."""
        return int(self._stage)

    def begin(self, state: State, metrics: Metrics) -> None:
        """Copy the state and start to write it."""
        self.finish()
        self._began_s = time.monotonic()
        tensors, own = state.parted(), state.own()
        self._needed_bytes = sum(each.n_bytes for each in tensors.values())
        self._needed_bytes += sum(t.numel() * t.element_size() for t in own.values())
        world = self._world
        ours = dealt(tensors)
        ours += [pieces.whole(name, tensor) for name, tensor in own.items()]
        parts = [self._copied(part) for part in ours]
        if not world.accelerator.on_host:
            world.accelerator.synchronize()
        self._meta = checkpoint.describe(
            self._graph,
            state.progress,
            n_ranks=world.n_ranks,
            metrics=metrics,
            settings=self._settings,
        )
        self._stage = Stage.WRITING
        self._run(lambda: self._write(parts), Stage.WRITTEN)
        self._still_s = time.monotonic() - self._began_s

    def heard(self, stages: Sequence[int]) -> None:
        """Go on when all are ready; fail when one did."""
        if self._stage == Stage.IDLE:
            return
        if Stage.FAILED in stages:
            self._fail()
        elif stages[0] == Stage.COMPLETE:
            self._end()
        elif self._world.is_first and all(stage == Stage.WRITTEN for stage in stages):
            self._stage = Stage.WRITING
            self._run(self._complete, Stage.COMPLETE)

    def finish(self) -> int | None:
        """Wait until the checkpoint under way is complete, or has failed; the newest complete."""
        start_s = mark_s = time.monotonic()
        said = not self._world.is_first
        while self._stage != Stage.IDLE:
            self._is_busy()
            now = time.monotonic()
            self._still_s += now - mark_s
            mark_s = now
            if not said and now - start_s > _SAY_S:
                said = True
                sys.stderr.write("polyreme: waiting until the checkpoint before is written\n")
            self.heard(self._world.gather(int(self._stage)))
        return self._saved

    def _open(self) -> str:
        """Make the folder and tidy it; a name that sets this attempt's folders apart."""
        world = self._world
        token, made = "", False
        if world.is_first:
            token = f"{time.time_ns():x}"
            with contextlib.suppress(OSError):  # the first save says so, if it still is
                self._home.mkdir(parents=True, exist_ok=True)
                checkpoints.sweep(self._home)
                made = True
        first: tuple[str, bool] = world.gather((token, made))[0]
        token, made = first
        end_s = time.monotonic() + self._shared_wait_s
        while made and not self._home.is_dir() and time.monotonic() < end_s:
            time.sleep(0.1)
        seen = world.gather(not made or self._home.is_dir())
        if not all(seen):
            rank = seen.index(False)
            what = (
                f"rank {rank} does not see {self._home}, which rank 0 made: the run folder must "
                "be on a file system that all hosts share"
            )
            raise RunError(what, rank=rank, op="save")
        return token

    @property
    def _partial(self) -> Path:
        assert self._meta is not None, "a save is under way"
        return self._home / f".step-{self._meta.progress.step}.{self._token}.partial"

    def _copied(self, part: pieces.Part) -> pieces.Part:
        """The part in memory of the host, which is used again at the next save."""
        local = part.local.detach()
        buffer = self._buffers.get(part.key)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            pinned = not self._world.accelerator.on_host
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
            self._buffers[part.key] = buffer
        buffer.copy_(local, non_blocking=True)
        return pieces.Part(name=part.name, shape=part.shape, offset=part.offset, local=buffer)

    def _run(self, work: Callable[[], None], then: Stage) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:  # what ends a thread must not go unheard
                self._error = error
                self._stage = Stage.FAILED
            else:
                self._stage = then

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _is_busy(self) -> bool:
        """Whether this rank's thread still works, after a short wait for it."""
        assert self._thread is not None, "a save is under way"
        self._thread.join(self._look_s)
        return self._thread.is_alive()

    def _write(self, parts: list[pieces.Part]) -> None:
        partial, rank = self._partial, self._world.rank
        partial.mkdir(parents=True, exist_ok=True)
        index = pieces.write(partial, rank, parts)
        write_synced(checkpoint.part_index(partial, rank), msgspec.json.encode(index))
        sync_folder(partial)

    def _complete(self) -> None:
        assert self._meta is not None, "a save is under way"
        checkpoint.complete(self._partial, self._meta)
        try:
            checkpoints.prune(self._run_folder, self._keep, self._best)
        except OSError as error:  # the new one is whole all the same
            sys.stderr.write(f"polyreme: older checkpoints cannot be removed: {error}\n")

    def _end(self) -> None:
        assert self._meta is not None, "a save is under way"
        self._stage = Stage.IDLE
        self._saved = self._meta.progress.step
        if self._log is not None:
            step = self._meta.progress.step
            self._log.write(
                CheckpointEvent(
                    t=self._log.t,
                    attempt=self._log.attempt,
                    step=step,
                    path=f"checkpoints/step-{step}",
                    seconds=self._still_s,
                    write_s=time.monotonic() - self._began_s,
                )
            )

    def _fail(self) -> None:
        """Tidy up, say why, and end the run or not; in the same step on all ranks."""
        while any(self._world.gather(self._is_busy())):
            pass
        assert self._meta is not None, "a save is under way"
        said = self._world.gather(None if self._error is None else self._in_words(self._error))
        rank = next(rank for rank, words in enumerate(said) if words is not None)
        self._stage, self._error = Stage.IDLE, None
        if self._world.is_first:
            shutil.rmtree(self._partial, ignore_errors=True)
        what = (
            f"the checkpoint of step {self._meta.progress.step} failed on rank {rank}: {said[rank]}"
        )
        if self._on_error == "stop":
            raise RunError(what, rank=rank, op="save")
        if self._log is not None:
            sys.stderr.write(f"polyreme: {what}\n")
            self._log.write(
                FaultEvent(
                    t=self._log.t, attempt=self._log.attempt, what=what, rank=rank, op="save"
                )
            )

    def _in_words(self, error: BaseException) -> str:
        if not isinstance(error, OSError):
            return f"{type(error).__name__}: {error}"
        needed = f"it needs {self._needed_bytes:,} bytes"
        free, kept = "how many are free is unknown", "what was there before it is unknown"
        with contextlib.suppress(OSError):  # the others wait for these words
            written = sum(path.stat().st_blocks for path in self._partial.glob("*")) * 512
            free = room(error, self._run_folder, written)
            before = checkpoints.newest(self._run_folder)
            kept = "there is none before it"
            if before is not None:
                kept = f"{before.name} stays the newest"
        place = error.filename or self._partial
        return f"{place}: {error.strerror or error}; {needed}, {free}; {kept}"
