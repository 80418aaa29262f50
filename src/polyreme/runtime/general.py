"""Steps by an algorithm's program: one process a worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from ..algo.effects import Record
from ..algo.sync.kind import State as WorkerState
from .agreed import Said
from .applied import Applied
from .mesh import World
from .player import Player
from .route import Came
from .saver import together
from .timing import step_times
from .workers import Team, TeamState


class General:
    """Any algorithm, one replica a worker: each of its processes plays the program on its part.

    Workers tell each other their wishes and the state of their checkpoints as they agree on
    losses, once a round.
    """

    def __init__(
        self, team: Team, applied: Applied, world: World, *, say: Callable[[], Said]
    ) -> None:
        places = applied.places
        rank, n = places.team
        self._team, self._say, self._traffic = team, say, applied.traffic
        self._places, self._accelerator = places, world.accelerator
        self._process = world.rank
        self._world = replace(world, rank=rank, n_ranks=n, group=places.peers)
        self._records: list[Record] = []
        self._player = Player(
            algorithm=team.algorithm,
            me=team.workers[rank],
            state=team.begun()[rank],
            gradients=lambda params, batch: team.gradients(rank, params, batch),
            world=self._world,
            ranks=places.peer_ranks,
            post=places.post,
            over_replica=None if places.replica is None else self._over_replica,
            on_record=self._records.append,
            say=self._told,
        )
        self.state = TeamState(team, self, applied, world)
        self.begin()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this worker sent."""
        return sum(self._player.ledger.bytes.values())

    def begin(self) -> None:
        """Start the clock of the next round here."""
        self._mark_s = time.perf_counter()
        self._computed_s, self._blocked_s = self._player.compute_s, self._player.blocked_s

    def steps(self, first: int, stop: int) -> Generator[list[Came], None, None]:
        """A round at a time."""
        player = self._player
        assert player.state["step"] == first, "state and progress are of the same step"
        try:
            while player.state["step"] < stop:
                self._records.clear()
                sent_bytes = self.sent_bytes
                player.round()
                yield self._came(self.sent_bytes - sent_bytes)
        finally:
            self._team.gradients.close()

    def settle(self) -> None:
        """Bring the mean model into the stage."""
        self._team.settle(self)

    def states(self) -> Mapping[int, WorkerState]:
        """Of this worker."""
        return {self._world.rank: self._player.state}

    def rest(self) -> None:
        """Between two steps it is there."""

    def put_states(self, states: Mapping[int, WorkerState], done: int = 0) -> None:
        """Go on from this."""
        self._player.state = dict(states[self._world.rank])

    def each(self, own: Mapping[int, torch.Tensor]) -> Iterator[torch.Tensor]:
        """The tensors of all workers in their order, one at a time."""
        world = self._world
        tensor = own[world.rank]
        if world.group is None:
            yield tensor
            return
        for rank, process in enumerate(self._places.peer_ranks):
            other = tensor.clone() if rank == world.rank else torch.empty_like(tensor)
            with world.record.inside("broadcast model", other, world.n_ranks, settles=False):
                dist.broadcast(other, process, group=world.group)
            yield other

    def _over_replica(self, partial: torch.Tensor, per_tensor: bool) -> torch.Tensor:
        """The sum over the processes of this replica, or those that have parts of the tensors."""
        group = self._places.inner if per_tensor else self._places.replica
        total = partial.to(self._world.device, copy=True)
        if group is not None:
            self._traffic.all_reduce(total, group, alike=False)
        return total.to(partial.device)

    def _told(self) -> tuple[float, ...]:
        said = self._say()
        own = (
            float(said.stop),
            float(said.save),
            self._player.compute_s - self._computed_s,
            float(self._accelerator.peak_bytes()),
        )
        group = self._places.replica
        if group is None:
            return own
        ranks = self._places.ranks
        rows = torch.zeros(len(ranks), len(own), dtype=torch.float64, device=self._world.device)
        rows[ranks.index(self._process)] = torch.tensor(own, dtype=torch.float64)
        told = self._traffic.sums(rows.flatten(), group)
        stops, saves, computed, peaks = (told[at :: len(own)] for at in range(len(own)))
        return max(stops), float(together(saves)), sum(computed) / len(ranks), max(peaks)

    def _came(self, sent_bytes: int) -> list[Came]:
        """What the round's steps came to, each with an equal part of its time."""
        player, n = self._player, max(1, len(self._records))
        step_s = time.perf_counter() - self._mark_s
        blocked_s = player.blocked_s - self._blocked_s
        self.begin()
        heard = player.heard
        return self._team.came(
            list(self._records),
            step_times(step_s / n, blocked_s / n, [row[2] / n for row in heard], self._world.rank),
            tuple(Said(stop=row[0] > 0, save=int(row[1])) for row in heard),
            int(max(row[3] for row in heard)),
            sent_bytes,
        )
