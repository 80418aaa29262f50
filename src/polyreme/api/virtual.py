"""All workers of a job on a virtual clock: the programs and gradients that processes play too."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..algo.effects import Record, Seen
from ..runtime.agreed import Said
from ..runtime.timing import StepTimes
from ..runtime.workers import Team, TeamState
from ..sim.driver import Simulation

if TYPE_CHECKING:
    import torch

    from ..algo.sync.kind import State as WorkerState
    from ..algo.worker import Worker
    from ..runtime.applied import Applied
    from ..runtime.mesh import World
    from ..runtime.route import Came
    from ..sim.options import Simulate


class Virtual:
    """A run's steps by all workers in this process; `now_s` is the virtual time."""

    def __init__(
        self,
        options: Simulate,
        team: Team,
        applied: Applied,
        world: World,
        *,
        say: Callable[[], Said],
    ) -> None:
        self._options, self._team, self._world, self._say = options, team, world, say
        self._records: list[Record] = []
        self._done = 0
        self.put_states(team.begun())
        self.state = TeamState(team, self, applied, world)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the first step of this attempt."""
        return self.simulation.clock.now_s

    @property
    def sent_bytes(self) -> int:
        """Bytes that the first worker's machine sent, as the log of a run in processes says."""
        machine, n = self._team.algorithm.sync.machine, self._team.n
        each = enumerate(self.simulation.sent_bytes)
        return sum(sent for player, sent in each if machine(player, n) == machine(0, n))

    def begin(self) -> None:
        """What is between rounds takes no virtual time."""

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """A round of every worker at a time."""
        assert self._done == first, "state and progress are of the same step"
        try:
            while self._done < stop:
                yield self._round(stop)
        finally:
            self._team.gradients.close()

    def _of_workers(self) -> list[Record]:
        """What a round of all workers came to, which all of them record alike."""
        self._records.clear()
        self.simulation.play(self._done + 1)
        self._done = int(self.simulation.states[0]["step"])
        return list(self._records)

    def _of_servers(self, stop: int) -> list[Record]:
        """What servers were told until it is as many steps of all workers as a push has batches."""
        each = self._team.algorithm.sync.per_push
        self.simulation.play(self._done + each)
        steps = range(self._done + 1, min(self._done + each, stop) + 1)
        found = [
            Record(
                step=step,
                seen=Seen(
                    rows=tuple(row for record in told for row in record.seen.rows),
                    workers=tuple(rank for record in told for rank in record.seen.workers),
                    apart=True,
                ),
                lr=told[-1].lr,
                delays=tuple(delay for record in told for delay in record.delays),
                suspects=tuple(sorted({w for record in told for w in record.suspects})),
            )
            for at, step in enumerate(steps)
            if (told := self._records[at::each])
        ]
        self._records.clear()
        self._done = steps[-1]
        return found

    def _round(self, stop: int) -> list[Came]:
        before, sent_bytes, now_s = self._spent(), self.sent_bytes, self.now_s
        records = self._of_servers(stop) if self._team.servers else self._of_workers()
        n = self._team.n * max(1, len(records))
        compute_s, comm_s, wait_s = (
            (after - held) / n for after, held in zip(self._spent(), before, strict=True)
        )
        return self._team.came(
            records,
            StepTimes(
                step_s=(self.now_s - now_s) * self._team.n / n,
                compute_s=compute_s,
                comm_s=comm_s,
                wait_s=wait_s,
            ),
            (self._say(),),
            self._world.accelerator.peak_bytes(),
            self.sent_bytes - sent_bytes,
        )

    def settle(self) -> None:
        """Bring the mean model into the stage."""
        self._team.settle(self)

    def states(self) -> Mapping[int, WorkerState]:
        """Of all workers."""
        return dict(enumerate(self.simulation.states))

    def rest(self) -> None:
        """What is under way comes; what is told of it is of the next step."""
        if self._team.servers:
            self.simulation.drain()

    def put_states(self, states: Mapping[int, WorkerState], done: int = 0) -> None:
        """Go on from these, with the clock at 0."""
        options, team = self._options, self._team
        self._done = done
        players = team.workers | team.servers
        workers: Sequence[Worker] = [players[rank] for rank in sorted(players)]
        seed = team.job.train.seed if options.seed is None else options.seed
        self.simulation = Simulation(
            team.algorithm,
            workers,
            [dict(states[rank]) for rank in sorted(players)],
            team.gradients,
            compute=options.compute,
            network=options.network,
            faults=options.faults,
            seed=seed,
            done=done,
            on_record=self._on_record,
            together=team.gradients.together,
        )

    def each(self, own: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors of all workers in their order."""
        return (own[rank] for rank in range(self._team.n))

    def _spent(self) -> tuple[float, float, float]:
        spent = self.simulation.spent
        return (
            sum(each.compute_s for each in spent),
            sum(each.comm_s for each in spent),
            sum(each.wait_s for each in spent),
        )

    def _on_record(self, worker: Worker, record: Record, now_s: float) -> None:
        if worker.rank == 0 or worker.rank >= worker.n:  # workers that meet record the same
            self._records.append(record)
