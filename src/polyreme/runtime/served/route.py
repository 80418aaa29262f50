"""A run's steps by workers and servers in processes of their own; this one evaluates and logs."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_bytes
from typing import TYPE_CHECKING, Any, Protocol

from safetensors.torch import save_file

from ...algo.effects import Record, Seen
from ...algo.sync.kind import State as WorkerState
from ...errors import RunError
from .. import own
from ..agreed import Said
from ..applied import Applied
from ..mesh import World
from ..route import Came
from ..timing import StepTimes
from ..transport.letters import TOKEN_BYTES, Kind, Letter
from ..transport.local import HOME, Address
from ..workers import Team, TeamState
from .home import Home, Told, loaded
from .memory import shared
from .nursery import Nursery

if TYPE_CHECKING:
    import torch

PATIENCE_S = 60.0


class Begin(Protocol):
    """What a member's process does: entry and arguments of the member `rank`."""

    def __call__(
        self, rank: int, life: int, step: int, address: Address, folder: Path
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """An importable function and what it is given."""


class Members:
    """Steps of a run whose workers come and go. `preload` are modules that they need.

    `folder` is where servers keep snapshots and the lists of what they applied, `warm` what makes
    members quick to begin (see `Nursery`).
    """

    def __init__(
        self,
        begin: Begin,
        folder: Path,
        preload: tuple[str, ...],
        warm: tuple[Callable[..., Any], tuple[Any, ...]] | None,
        team: Team,
        applied: Applied,
        world: World,
        *,
        say: Callable[[], Said],
    ) -> None:
        self._begin, self._folder, self._preload, self._warm = begin, folder, preload, warm
        self._team, self._world, self._say = team, world, say
        self._sync: Any = team.algorithm.sync
        self._home: Home | None = None
        self._rested, self._n_asked = False, 0
        self._compute_s = 0.0
        self.sent_bytes = 0
        self.put_states(team.begun())
        self.state = TeamState(team, self, applied, world)

    # The run's loop -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Have workers go on that rest."""
        if self._rested and self._home is not None:
            for rank in range(self._team.n):
                self._home.send(rank, Letter(Kind.GO, HOME))
        self._rested = False

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """As many at a time as a push has batches, once all workers together pushed so often."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():  # of an earlier attempt
            path.unlink()
        with tempfile.TemporaryDirectory(prefix="polyreme-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            for rank, state in self._states.items() if first else ():
                save_file(own.apart(state), folder / f"state-{rank}.safetensors")
            with self._memory() as files:
                token, memory = token_bytes(TOKEN_BYTES), files[0] if files else None
                address = Address(folder=folder, token=token, memory=memory)
                with Nursery(self._preload, folder, self._warm, files) as nursery:
                    yield from self._played(nursery, address, first, stop)

    @contextmanager
    def _memory(self) -> Iterator[tuple[int, ...]]:
        """The file that workers share, if they do."""
        if not self._sync.in_memory:
            yield ()
            return
        with shared(self._states[self._team.n], self._team.n) as file:
            yield (file,)

    def _played(
        self, nursery: Nursery, address: Address, first: int, stop: int
    ) -> Iterator[list[Came]]:
        def start(rank: int, life: int, step: int) -> None:
            nursery.begin(rank, *self._begin(rank, life, step, address, self._folder))

        home = Home(
            nursery,
            address,
            n=self._team.n,
            servers=len(self._team.servers),
            begin=start,
            timeout_s=self._team.job.train.timeout_s,
        )
        self._home = home
        try:
            yield from self._steps(home, first, stop)
            self.rest()
        except GeneratorExit:  # asked to stop
            self.rest()
            raise
        finally:
            self._home = None
            home.close()

    def _steps(self, home: Home, first: int, stop: int) -> Iterator[list[Came]]:
        each, n, came_s = self._sync.per_push, self._team.n, time.monotonic()
        while first < stop:
            start_s = time.monotonic()
            rows: list[Told] = []
            while len(rows) < each * n:
                home.check()
                try:
                    rows.append(home.told.get(timeout=0.1))
                except Empty:
                    self._look(home, start_s)
            steps = range(first + 1, min(first + each, stop) + 1)
            records = [_record(step, rows[at::each]) for at, step in enumerate(steps)]
            times = self._times(home, max(rows[-1].came_s - came_s, 1e-9), len(records))
            came_s = rows[-1].came_s
            before, self.sent_bytes = self.sent_bytes, self._sent(home)
            first = steps[-1]
            came = self._team.came(
                records,
                times,
                (self._say(),),
                self._world.accelerator.peak_bytes(),
                self.sent_bytes - before,
            )
            faults = tuple(_taken(home.faults))
            yield [replace(came[0], faults=faults), *came[1:]]

    def _sent(self, home: Home) -> int:
        """Bytes that the first worker's machine sent."""
        n, machine = self._team.n, self._sync.machine
        there = (rank for rank in home.members if machine(rank, n) == machine(0, n))
        return int(sum(home.total(rank).sent_bytes for rank in there))

    def _look(self, home: Home, start_s: float) -> None:
        """Raise RunError if nobody has pushed for the run's own limit."""
        if time.monotonic() - start_s > self._team.job.train.timeout_s:
            silent = [f"worker {rank}" for rank in range(self._team.n) if home.members[rank].silent]
            raise RunError(f"no worker has pushed for a while; silent: {', '.join(silent)}")

    def _times(self, home: Home, step_s: float, n_steps: int) -> StepTimes:
        """Means over workers since the last."""
        n = self._team.n
        before_s, self._compute_s = (
            self._compute_s,
            sum(home.total(rank).compute_s for rank in range(n)),
        )
        share = min(step_s, (self._compute_s - before_s) / n) / n_steps
        return StepTimes(
            step_s=step_s / n_steps,
            compute_s=share,
            comm_s=0.0,
            wait_s=step_s / n_steps - share,
        )

    def settle(self) -> None:
        """Bring the servers' parameters into the stage."""
        if self._home is None:
            self._team.settle(self)
            return
        found = self._asked(
            self._home, {rank: Letter(Kind.SEND, HOME) for rank in self._home.servers}
        )
        self._take_buffers(self._home)
        states = [{"params": loaded(found[rank])["params"]} for rank in sorted(found)]
        self._team.gradients.put(self._sync.whole(states))
        self._team.settle_buffers(self)

    # Workers ------------------------------------------------------------------------------------

    def states(self) -> Mapping[int, WorkerState]:
        """Of all, as they were when they rested last."""
        return self._states

    def put_states(self, states: Mapping[int, WorkerState], done: int = 0) -> None:
        """Begin from these."""
        self._states = {rank: dict(state) for rank, state in states.items()}

    def each(self, own: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors of all workers in their order."""
        return (own[rank] for rank in range(self._team.n))

    def rest(self) -> None:
        """Have all workers stop between rounds until `begin`, and take all states.

        Of one that does not answer, is killed after it did, or has not had all that it asked for
        when it came, the state is that of a worker that comes anew. Servers' states do not know
        what workers hold, as answers are under way: those that begin from them send all.
        """
        home = self._home
        if home is None or self._rested:
            return
        letters = self._asked(
            home, {rank: Letter(Kind.REST, HOME) for rank in range(self._team.n)}, needed=False
        )
        rested = {rank: loaded(letter) for rank, letter in letters.items()}
        whole = {}
        for server in home.servers:
            known = [
                [rank, letters[rank].life, int(tensors[f"last/{server}"])]
                for rank, tensors in rested.items()
            ]
            body = json.dumps(known).encode()
            whole[server] = Letter(Kind.SEND, HOME, 0, 1, 0, body)
        given, algorithm = self._asked(home, whole), self._team.algorithm
        for server, letter in given.items():
            state = own.joined(loaded(letter), self._states[server])
            self._states[server] = self._sync.answers(algorithm).forgotten(state)
        for rank in range(self._team.n):
            if rank in rested:
                self._states[rank] = own.joined(rested[rank], self._states[rank])
            lives = rank in rested and letters[rank].life == home.members[rank].life
            if not lives or self._states[rank]["new"]:
                self._states[rank] = self._sync.anew(algorithm, self._states[rank])
                continue
            for server in home.servers:
                if not self._sync.owes(self._states[server], rank):
                    self._arrive(rank, server)
        self._take_buffers(home)
        self._rested = True

    def _arrive(self, rank: int, server: int) -> None:
        """What a server had answered was under way to a worker that waits for it."""
        team, key = self._team, str(server - self._team.n)
        if not self._states[rank]["awaits"][key]:
            return
        answer, self._states[server] = self._sync.reply(
            team.algorithm, self._states[server], rank, team.servers[server]
        )
        self._states[rank] = self._sync.pulled(
            team.algorithm, self._states[rank], key, answer, team.workers[rank]
        )

    def _asked(
        self, home: Home, letters: Mapping[int, Letter], *, needed: bool = True
    ) -> dict[int, Letter]:
        """What members answer; asked again while they do not, as one may be begun anew."""
        self._n_asked += 1  # answers to what was asked before do not count
        found: dict[int, Letter] = {}
        end_s = time.monotonic() + PATIENCE_S
        while len(found) < len(letters):
            for rank in letters.keys() - found.keys():
                home.send(rank, letters[rank]._replace(covered=self._n_asked))
            turn_s = time.monotonic() + 1.0
            while len(found) < len(letters) and time.monotonic() < turn_s:
                home.check()
                try:
                    letter = home.here.get(timeout=0.05)
                except Empty:
                    continue
                if letter.source in letters and letter.covered == self._n_asked:
                    found[letter.source] = letter
            if time.monotonic() > end_s:
                if needed:
                    missing = ", ".join(map(str, sorted(letters.keys() - found.keys())))
                    raise RunError(f"members {missing} do not answer for {PATIENCE_S:g} s")
                break
        return found

    def _take_buffers(self, home: Home) -> None:
        for rank, buffers in list(home.buffers.items()):
            if len(buffers) == len(self._team.gradients.buffers[rank]):
                self._team.gradients.buffers[rank] = buffers


def _taken(queue: SimpleQueue[Any]) -> Iterator[Any]:
    """What is in a queue now."""
    while not queue.empty():
        yield queue.get()


def _record(step: int, told: list[Told]) -> Record:
    """A step of all, of what was told of each push."""
    return Record(
        step=step,
        seen=Seen(
            rows=tuple(each.row for each in told),
            workers=tuple(each.worker for each in told),
            apart=True,
        ),
        lr=told[-1].lr,
        delays=tuple(each.delay for each in told if each.delay >= 0),
        suspects=tuple(sorted({worker for each in told for worker in each.suspects})),
    )
