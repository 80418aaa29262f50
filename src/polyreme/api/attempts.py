"""The attempts of a run: after a rank failed all start again from the newest checkpoint."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from ..cluster.accelerator import Accelerator
from ..cluster.detect import detect
from ..cluster.types import Cluster
from ..errors import PolyremeError, RunError
from ..plan import store as plans
from ..runtime.launch import Launcher, RankFailed
from . import folders, starting
from .aftermath import next_attempt, note
from .ranks import Request, Result, n_devices, work

_MOST_WAIT_S = 60.0
_AGAIN = ("died", "stalled", "backend")


class Attempts:
    """Runs a request in ranks until it is through, or may not be tried again.

    `begun` says whether the run folder is this run's.
    """

    def __init__(self, launcher: Launcher, request: Request, logs: Path) -> None:
        self._launcher = launcher
        self._request = request
        self._logs = logs
        self._plan_is_given = bool(request.plans)
        self._train = request.spec.train
        self._n_wanted = request.cluster.n_devices
        self._n_there = request.accelerator.count()
        self._indices = tuple(range(self._n_wanted))
        self._n_restarts = 0
        self._n_in_row = 0  # restarts since the newest checkpoint
        self._last: tuple[int | None, Path | None] | None = None  # whom the last failure blamed
        goes_on = folders.goes_on(request.folder, request.resume)
        self._first_attempt = next_attempt(request.folder) if goes_on else 0
        self.begun = False
        self.folder = request.folder

    @property
    def attempt(self) -> int:
        """The number of the current attempt in the log."""
        return self._first_attempt + self._n_restarts

    @property
    def machines(self) -> tuple[Cluster, Accelerator]:
        """What the current attempt runs on."""
        return self._request.cluster, self._request.accelerator

    def run(self) -> None:
        """Until the run has ended.

        Raises:
            RankFailed: the last attempt failed, and there may be no other.
            RunError: too few devices are left.
            PolyremeError: what a rank raised.
            KeyboardInterrupt: a signal ended the run.
        """
        while True:
            try:
                self._once()
                return
            except RankFailed as error:
                again = error.verdict.kind in _AGAIN and self._n_restarts < self._train.restarts
                if not again:
                    raise
                self._prepare(error)
            finally:
                self.begun = self.begun or self._has_begun()

    def note(self, error: PolyremeError) -> None:
        """Write the error that ended the run into its log, if the folder is its own."""
        if not self.begun:
            return
        outcome = self._launcher.outcome
        if isinstance(error, RankFailed):
            note(self.folder, self.attempt, error.words, error.verdict, error.accounts)
        elif outcome is not None and outcome.failures:  # a rank raised it
            note(self.folder, self.attempt, str(error), outcome.verdict, outcome.accounts)
        else:
            note(self.folder, self.attempt, str(error), None, ())

    def _once(self) -> None:
        request = dataclasses.replace(
            self._request, attempt=self.attempt, devices=self._indices, again=self.begun
        )
        n_processes = n_devices(request.plans[0]) if request.plans else len(self._indices)
        result = self._launch(request, n_processes)
        if result.summary is None:
            request = dataclasses.replace(request, plans=result.plans)
            self._launch(request, n_devices(result.plans[0]))

    def _launch(self, request: Request, n_processes: int) -> Result:
        timeout_s = self._train.timeout_s
        results: list[Result] = self._launcher.run(
            work,
            (request,),
            n_processes=n_processes,
            attempt=self.attempt,
            logs=self._logs,
            grace_s=timeout_s,
            timeout_s=timeout_s,
        )
        return results[0]

    def _has_begun(self) -> bool:
        outcome = self._launcher.outcome
        if outcome is None:  # the process that knew is gone
            return starting.begun(self.folder, self._request.start.launch) is not None
        return outcome.accounts[0].phase != "starting"

    def _prepare(self, error: RankFailed) -> None:
        """Note what happened, wait, and make the request of the next attempt."""
        self.begun = self.begun or self._has_begun()
        request, folder = self._request, self.folder
        if self.begun:
            self.note(error)
        start_s = time.time()
        resume = request.start.again(folder) if self.begun else request.resume
        found = resume[0] if resume else None
        blamed = error.verdict.rank, found
        new_checkpoint = self._last is None or self._last[1] != found
        self._n_in_row = 0 if new_checkpoint else self._n_in_row + 1
        wait_s = min(_MOST_WAIT_S, self._train.restart_wait_s * 2 ** min(self._n_in_row, 10))
        where = "from the start" if found is None else f"from {found.name}"
        sys.stderr.write(
            f"polyreme: {error.verdict.what}; starting again {where} in {wait_s:g} s "
            f"(restart {self._n_restarts + 1} of {self._train.restarts})\n"
        )
        time.sleep(wait_s)
        if self.begun:
            kept = plans.load(folder / folders.PLAN)
            request = dataclasses.replace(request, plans=(kept,), resume=resume)
        again = blamed[0] is not None and self._last == blamed
        request = self._with_devices_left(request, blamed[0] if again else None, error)
        self._last = blamed
        self._n_restarts += 1
        self._request = dataclasses.replace(request, start_s=start_s)

    def _with_devices_left(self, request: Request, bad: int | None, error: RankFailed) -> Request:
        """The request on the devices that are left, with a plan to be found if some are lost.

        A rank that failed twice in a row is left out where that is allowed; its device may be
        broken without being gone.
        """
        least = self._train.min_devices
        try:
            (n_there,) = self._launcher.run(count, (request.accelerator,), n_processes=1)
        except RankFailed:  # it was killed too
            n_there = self._n_there
        left = self._indices
        if n_there < self._n_there:
            left = left[: min(len(left), n_there)]
            self._n_there = n_there
        elif bad is not None and least is not None and len(left) > least:
            left = left[:bad] + left[bad + 1 :]
        if len(left) == len(self._indices):
            return request
        needed = n_devices(request.plans[0]) if request.plans else None
        if needed is not None and needed <= len(left):
            self._indices = left
            return request
        if len(left) < (self._n_wanted if least is None else least):
            raise RunError(
                f"{len(left)} of {self._n_wanted} devices are left, and train.min_devices "
                f"{'is not set' if least is None else f'is {least}'}; before that: {error}"
            )
        if self._plan_is_given:
            raise RunError(
                f"{len(left)} of {self._n_wanted} devices are left, and the plan that was given "
                f"wants {needed}; before that: {error}"
            )
        self._indices = left
        cluster = detect(request.accelerator, len(left))
        return dataclasses.replace(request, plans=(), cluster=cluster, all_devices=False)


def count(accelerator: Accelerator) -> int:
    """Devices of this machine, as a process sees them that has not looked before."""
    return accelerator.count()
