"""A job's workers on a virtual clock: the same programs and gradients as in processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..algo.vector import mean
from ..data.order import arrange
from ..runtime.apply.data import alone, apply
from ..runtime.feed import Feed, Seat
from ..runtime.general import mean_buffer, worker_of
from ..runtime.gradients import Gradients
from ..runtime.job import Job
from ..sim.driver import Simulation

if TYPE_CHECKING:
    import torch

    from ..algo.effects import Record
    from ..algo.worker import Worker
    from ..runtime.apply.data import Applied
    from ..runtime.mesh import World
    from ..sim.compute import Compute
    from ..sim.network import Network


class VirtualRun:
    """`n` workers of a job, with one model between them. `world` is a lone process."""

    def __init__(
        self,
        job: Job,
        world: World,
        n: int,
        *,
        compute: Compute,
        network: Network,
        on_record: Callable[[Worker, Record, float], None] | None = None,
    ) -> None:
        train, algorithm = job.train, job.algorithm
        self.job, self.world, self.n = job, world, n
        self.applied: Applied = apply(
            job.graph, alone(job.plan), world, seed=train.seed, compile_layers=train.compile
        )
        self.order = arrange(
            job.source,
            job.partition,
            n_workers=n,
            global_batch=train.global_batch,
            seed=train.seed,
            tail=train.tail,
        )
        if train.steps is not None:
            self.n_steps = train.steps
        else:
            assert train.epochs is not None, "the spec gives steps or epochs"
            self.n_steps = self.order.n_steps(train.epochs)
        self.feeds = {
            worker: Feed(
                source=job.source,
                order=self.order,
                graph=job.graph,
                seat=Seat(worker=worker, n_workers=n),
                device=world.device,
                n_microbatches=job.plan.microbatches,
            )
            for worker in range(n)
        }
        self.gradients = Gradients(self.applied, self.feeds, seed=train.seed)
        start = self.gradients.start()
        workers = [
            worker_of(job, rank, n, self.gradients, self.order, self.n_steps) for rank in range(n)
        ]
        self.simulation = Simulation(
            algorithm,
            workers,
            [algorithm.sync.init(algorithm, start.clone(), me) for me in workers],
            self.gradients,
            compute=compute,
            network=network,
            on_record=on_record,
        )
        self.applied.stage.train()

    def play(self, until: int) -> None:
        """Rounds of all workers up to a step."""
        self.simulation.play(until)

    def model(self) -> torch.Tensor:
        """The mean of the workers' models."""
        sync, states = self.job.algorithm.sync, self.simulation.states
        if sync.agrees(self.job.algorithm):
            return sync.model(states[0])
        return mean(sync.model(state) for state in states)

    def settle(self) -> None:
        """Bring the mean model, and the mean of buffers, into the stage."""
        self.gradients.put(self.model())
        each = zip(*self.gradients.buffers.values(), strict=True)
        self.gradients.put_buffers([mean_buffer(buffers) for buffers in each])
