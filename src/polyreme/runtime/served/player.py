"""What a process of a worker or server does from its beginning to its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from ...algo.sync.kind import State
from ...algo.sync.peers import Peers
from ...algo.sync.served import Served
from ...data.order import arrange
from .. import own
from ..feed import Feed, Seat
from ..job import Job
from ..making import alone, apply, grid_for
from ..mesh import World
from ..transport.local import Address
from ..workers import Team
from . import mean
from .peer import Peer
from .shared import roles

SNAPSHOT_S = 5.0


def play(
    job: Job, world: World, rank: int, life: int, step: int, address: Address, folder: Path
) -> None:
    """Be the worker or server of that number; `life` counts how often it was begun.

    A worker that is begun anew goes on behind its batch `step`.
    """
    n = grid_for(job.plan).replica
    sync = job.algorithm.sync
    assert isinstance(sync, Served | Peers)
    team = _team(job, world, n, (rank if rank < n else 0,))
    begun = team.begun()
    state: State = begun[rank]
    left = address.folder / f"state-{rank}.safetensors"
    if left.exists():
        state = own.joined(load_file(left), state)
    gradients = team.gradients
    if isinstance(sync, Peers):
        if rank < n and life:
            params = mean.read(address.folder, state["params"])
            counts = {"step": step + 1}  # what it had begun may have come
            state = sync.anew(job.algorithm, {**state, "params": params, **counts})
        Peer(
            sync=sync,
            algorithm=job.algorithm,
            me=(team.workers | team.servers)[rank],
            state=state,
            gradients=lambda params, batch: gradients(rank, params, batch),
            buffers=lambda: gradients.buffers[rank] if rank < n else (),
            address=address,
            folder=folder,
            life=life,
            snapshot_s=SNAPSHOT_S,
        ).play()
        return
    work, serve = roles(sync, address, team.servers[n], begun[n])
    if rank >= n:
        serve(
            algorithm=job.algorithm,
            me=team.servers[rank],
            state=state,
            address=address,
            folder=folder,
            life=life,
            snapshot_s=SNAPSHOT_S,
        ).play()
        return
    if life:
        step += sync.per_push  # the one that it had begun may have come
        counts = {"step": step, "pushes": step // sync.per_push}
        state = sync.anew(job.algorithm, {**state, **counts})
    work(
        algorithm=job.algorithm,
        me=team.workers[rank],
        state=state,
        gradients=lambda params, batch: gradients(rank, params, batch),
        buffers=lambda: gradients.buffers[rank],
        address=address,
        life=life,
    ).play()


def _team(job: Job, world: World, n: int, ranks: Sequence[int]) -> Team:
    """These workers, and all servers."""
    train = job.train
    applied = apply(
        job.graph, alone(job.plan), world, seed=train.seed, compile_layers=train.compile
    )
    order = arrange(
        job.source,
        job.partition,
        n_workers=n,
        global_batch=train.global_batch,
        seed=train.seed,
        tail=train.tail,
    )
    feeds = {
        worker: Feed(
            source=job.source,
            order=order,
            graph=job.graph,
            seat=Seat(worker=worker, n_workers=n),
            device=world.device,
            n_microbatches=job.plan.microbatches,
            reads=applied.stage.reads,
            attack=job.attack,
        )
        for worker in ranks
    }
    n_steps = train.steps if train.steps is not None else order.n_steps(train.epochs or 0)
    applied.stage.train()
    return Team(job, applied, feeds, order, n, n_steps)
