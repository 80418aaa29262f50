"""One tiny job played by processes and on the virtual clock: what each comes to."""

from __future__ import annotations

from pathlib import Path

from polyreme.algo.compose import DataParallel
from polyreme.api.virtual import Virtual
from polyreme.runtime import checkpoint, checkpoints, loop
from polyreme.runtime.gathering import full_parameters
from polyreme.runtime.saver import Saver
from polyreme.sim.options import Simulate
from tiny import Case, Model


def job_of(algorithm: DataParallel, n: int, **more) -> Case:
    more = {"steps": 6, "global_batch": 6, **more}
    layout = {"replica": n, "precision": "fp32", "microbatches": 1}
    model = Model(tied=True, gain=True, batch_norm=True)
    return Case(model, layout, algorithm=algorithm, general=True, **more)


def in_processes(world, case: Case, run: Path | None = None, until: int = 0, resume: bool = False):
    job = case.job()
    newest = checkpoints.newest(run) if resume else None
    outcome = loop.train(
        job,
        world,
        stop=(lambda: True) if until else None,
        save=None if run is None else Saver(run, job.graph, world, keep=2),
        load=(lambda state: checkpoint.load(state, newest, graph=job.graph)) if newest else None,
    )
    return dict(full_parameters(outcome.state)), outcome.steps, outcome.wire_bytes


def on_the_clock(world, case: Case, n: int, run: Path | None = None, until: int = 0):
    routes: list[Virtual] = []

    def make_route(*args, **more):
        routes.append(Virtual(Simulate(workers=n), *args, **more))
        return routes[0]

    job = case.job()
    outcome = loop.train(
        job,
        world,
        stop=(lambda: True) if until else None,
        save=None if run is None else Saver(run, job.graph, world, keep=2),
        make_route=make_route,
    )
    return dict(full_parameters(outcome.state)), routes[0].simulation.sent_bytes


def constants_in_processes(world, case: Case):
    return _constants(loop.Run(case.job(), world))


def constants_on_the_clock(world, case: Case, n: int):
    def make_route(*args, **more):
        return Virtual(Simulate(workers=n), *args, **more)

    return _constants(loop.Run(case.job(), world, make_route=make_route))


def _constants(run: loop.Run):
    run.play()
    return run.team.anchors(run.applied, run.world)
