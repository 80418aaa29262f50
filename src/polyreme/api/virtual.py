"""All workers of a job on a virtual clock: the programs and gradients that processes play too."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..runtime.driver import Said
from ..runtime.timing import StepTimes
from ..runtime.workers import Team, TeamState
from ..sim.driver import Simulation

if TYPE_CHECKING:
    import torch

    from ..algo.effects import Record
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
        self.put_states(team.begun())
        self.state = TeamState(team, self, applied, world)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the first step of this attempt."""
        return self.simulation.clock.now_s

    @property
    def sent_bytes(self) -> int:
        """Bytes that the first worker sent, as the log of a run in processes says."""
        return self.simulation.sent_bytes[0]

    def begin(self) -> None:
        """What is between rounds takes no virtual time."""

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """A round of every worker at a time."""
        assert self._done == first, "state and progress are of the same step"
        try:
            while self._done < stop:
                yield self._round()
        finally:
            self._team.gradients.close()

    def _round(self) -> list[Came]:
        self._records.clear()
        before, sent_bytes, now_s = self._spent(), self.sent_bytes, self.now_s
        self.simulation.play(self._done + 1)
        n = self._team.n * max(1, len(self._records))
        compute_s, comm_s, wait_s = (
            (after - held) / n for after, held in zip(self._spent(), before, strict=True)
        )
        return self._team.came(
            list(self._records),
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

    def put_states(self, states: Mapping[int, WorkerState]) -> None:
        """Go on from these, with the clock at 0."""
        options, team = self._options, self._team
        workers: Sequence[Worker] = [team.workers[rank] for rank in range(team.n)]
        seed = team.job.train.seed if options.seed is None else options.seed
        self.simulation = Simulation(
            team.algorithm,
            workers,
            [dict(states[rank]) for rank in range(team.n)],
            team.gradients,
            compute=options.compute,
            network=options.network,
            faults=options.faults,
            seed=seed,
            on_record=self._on_record,
            together=team.gradients.together,
        )

    def each(self, own: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors of all workers in their order."""
        return (own[rank] for rank in range(self._team.n))

    @property
    def _done(self) -> int:
        return int(self.simulation.states[0]["step"])

    def _spent(self) -> tuple[float, float, float]:
        spent = self.simulation.spent
        return (
            sum(each.compute_s for each in spent),
            sum(each.comm_s for each in spent),
            sum(each.wait_s for each in spent),
        )

    def _on_record(self, worker: Worker, record: Record, now_s: float) -> None:
        if worker.rank == 0:  # all workers record the same
            self._records.append(record)
