"""Where this process lies in a plan's grid, and the groups that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..cluster.accelerator import HOST_BACKEND
from ..plan.grid import Cell, Degrees, Grid
from .mesh import World

Group = Any  # dist.ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Places:
    """This process's cell of the grid, and process groups (None: it would be alone in one).

    `data` are those that share the batch and hold the same part of the model, `mesh` what its
    parameters are sharded over, `tp` those that hold the parts of its tensors; `inner` the devices
    of a replica that hold parts of the same layers (shard x tp), `replica` all devices of it;
    `copies` by n the n neighbouring tensor parts that it is among, `shared` the holders of layers
    that lie on several pipeline ranks, by these. Messages to later pipeline ranks go over `up`,
    to earlier ones over `down`, both over host memory; those of accelerators over `pairs`, by
    sender and receiver: one backend carries out all of a group in the order in which it was asked.

    Where replicas work apart, `grid` is of one of them, number `team[0]` of `team[1]`; `peers`
    are the processes at the same place of each, of these ranks. Messages from one of them to
    another go over `post`, over host memory: on accelerators two that send to each other before
    they receive would wait for ever.
    """

    grid: Grid
    cell: Cell
    ranks: tuple[int, ...]
    data: Group = None
    tp: Group = None
    inner: Group = None
    replica: Group = None
    mesh: DeviceMesh | None = None
    copies: Mapping[int, Group] = field(default_factory=dict)
    shared: Mapping[tuple[int, ...], Group] = field(default_factory=dict)
    up: Group = None
    down: Group = None
    pairs: Mapping[tuple[int, int], Group] = field(default_factory=dict)
    peers: Group = None
    post: Group = None
    peer_ranks: tuple[int, ...] = (0,)
    team: tuple[int, int] = (0, 1)

    @property
    def data_rank(self) -> int:
        """Which share of every batch is this process's."""
        return self.cell.replica * self.grid.shard + self.cell.shard

    def wire(self, sender: int, receiver: int, *, on_host: bool) -> Group:
        """What messages between two pipeline ranks go over."""
        if on_host:
            return self.up if receiver > sender else self.down
        return self.pairs[sender, receiver]

    def rank_at(self, *, pipe: int) -> int:
        """The process at this place of another pipeline rank."""
        return self.ranks[pipe * self.grid.degrees.n_devices + self._place]

    def rank(self, *, pipe: int, shard: int, tp: int) -> int:
        """The process at a place of this replica."""
        grid = self.grid
        data = self.cell.replica * grid.shard + shard
        return self.ranks[pipe * grid.degrees.n_devices + data * grid.tp + tp]

    def agree(self, values: Sequence[int]) -> bool:
        """Whether processes of one pipeline rank have the same, given by rank (or nothing)."""
        n = self.grid.degrees.n_devices
        rows = [self.ranks[at : at + n] for at in range(0, len(self.ranks), n)]
        return not values or all(len({values[rank] for rank in row}) == 1 for row in rows)

    @property
    def _place(self) -> int:
        return self.data_rank * self.grid.tp + self.cell.tp


def cell_of(grid: Grid, rank: int) -> Cell:
    """The cell of a process: they take the plan's devices in ascending order."""
    return grid.cell(sorted(grid.devices)[rank])


def take_places(
    world: World, grid: Grid, shared: Iterable[tuple[int, ...]] = (), *, apart: bool = False
) -> Places:
    """Make the groups; all processes call it together.

    `shared` are the sets of pipeline ranks that hold the same layers. With `apart` each replica
    is a team of its own.
    """
    assert len(grid.devices) == world.n_ranks, "one process per device of the plan"
    ascending = sorted(grid.devices)
    ranks = tuple(ascending.index(device) for device in grid.devices)
    cell = cell_of(grid, world.rank)
    if world.group is None:
        return Places(grid=grid, cell=cell, ranks=ranks)
    cube = torch.tensor(ranks).reshape(grid.pp, grid.replica, grid.shard, grid.tp)
    if apart:
        return _team(cube, grid, cell, shared, world)
    mesh = _mesh(cube, grid.degrees, world)
    if grid.pp == grid.tp == 1:
        shards = None if mesh is None else mesh.get_group("shard")
        return Places(
            grid=grid,
            cell=cell,
            ranks=ranks,
            data=world.group,
            inner=shards,
            replica=shards,
            mesh=mesh,
        )
    return Places(
        grid=grid,
        cell=cell,
        ranks=ranks,
        data=_mine(cube, (1, 2), world),
        tp=_mine(cube, (3,), world),
        inner=_mine(cube, (2, 3), world),
        replica=world.group if grid.replica == 1 else _mine(cube, (0, 2, 3), world),
        mesh=mesh,
        copies={n: _copies(cube, n, world) for n in _between(grid.tp)},
        shared={pipes: _mine(cube[list(pipes)], (0,), world) for pipes in sorted(set(shared))},
        up=_wire(cube, world),
        down=_wire(cube, world),
        pairs=_pairs(cube, grid, world),
    )


def _team(
    cube: torch.Tensor, grid: Grid, cell: Cell, shared: Iterable[tuple[int, ...]], world: World
) -> Places:
    """Places in one of several replicas."""
    alone = grid.degrees.n_devices * grid.pp == grid.replica
    mesh = _mesh(cube, grid.degrees, world)
    peers = world.group if alone else _mine(cube, (1,), world)
    return Places(
        grid=grid.of_replica(cell.replica),
        cell=msgspec.structs.replace(cell, replica=0),
        ranks=tuple(cube[:, cell.replica].flatten().tolist()),
        data=_mine(cube, (2,), world),
        tp=_mine(cube, (3,), world),
        inner=_mine(cube, (2, 3), world),
        replica=_mine(cube, (0, 2, 3), world),
        mesh=mesh["shard"] if mesh is not None and mesh.ndim == 2 else mesh,
        copies={n: _copies(cube, n, world) for n in _between(grid.tp)},
        shared={pipes: _mine(cube[list(pipes)], (0,), world) for pipes in sorted(set(shared))},
        up=_wire(cube, world),
        down=_wire(cube, world),
        pairs=_pairs(cube, grid, world),
        peers=peers,
        post=peers if world.accelerator.on_host else _mine(cube, (1,), world, HOST_BACKEND),
        peer_ranks=tuple(cube[cell.pipe, :, cell.shard, cell.tp].tolist()),
        team=(cell.replica, grid.replica),
    )


def _mine(
    cube: torch.Tensor, axes: Sequence[int], world: World, backend: str | None = None
) -> Group:
    """The group over some axes that this process is in; None where it is alone or in none."""
    others = [axis for axis in range(cube.dim()) if axis not in axes]
    size = 1
    for axis in axes:
        size *= cube.shape[axis]
    if size == 1:
        return None
    rows = cube.permute(*others, *axes).reshape(-1, size)
    return _of_rows(rows, world, backend)


def _copies(cube: torch.Tensor, n: int, world: World) -> Group:
    """The group of n neighbouring tensor parts."""
    return _of_rows(cube.reshape(-1, n), world)


def _of_rows(rows: torch.Tensor, world: World, backend: str | None = None) -> Group:
    mine = None
    for row in rows.tolist():
        group = dist.new_group(row, backend=backend)  # all processes make all groups, in one order
        if world.rank in row:
            mine = group
    return mine


def _wire(cube: torch.Tensor, world: World) -> Group:
    """A group over host memory of all pipeline ranks."""
    if len(cube) == 1:
        return None
    if world.accelerator.on_host:
        return dist.new_group()
    return _of_rows(cube.reshape(len(cube), -1).T, world, HOST_BACKEND)


def _pairs(cube: torch.Tensor, grid: Grid, world: World) -> dict[tuple[int, int], Group]:
    """Groups of accelerators that hand something to each other; each has passed a message.

    A first one would hold up the host until the other side has asked for it.
    """
    if len(cube) == 1 or world.accelerator.on_host:
        return {}
    steps = {
        pair
        for one, other in pairwise(grid.holders)
        for ends in zip(one, other, strict=True)
        for pair in (ends, ends[::-1])
        if ends[0] != ends[1]
    }
    found = {pair: _mine(cube[list(pair)], (0,), world) for pair in sorted(steps)}
    own = grid.cell(sorted(grid.devices)[world.rank]).pipe
    token = torch.zeros(1, device=world.device)
    for (sender, receiver), group in found.items():
        if group is None:
            continue
        sends = own == sender
        peer = dist.get_global_rank(group, group.size() - 1 - group.rank())
        with world.record.message("send" if sends else "recv", peer, token.nbytes):
            if sends:
                dist.send(token, peer, group=group)
            else:
                assert own == receiver, "a group of two"
                dist.recv(token, peer, group=group)
            world.accelerator.synchronize()
    return found


def _between(tp: int) -> list[int]:
    """How many tensor parts may hold the same, beside one and all."""
    return [n for n in range(2, tp) if tp % n == 0]


def _mesh(cube: torch.Tensor, degrees: Degrees, world: World) -> DeviceMesh | None:
    """What parameters are sharded over: (replica, shard), or the shards of one replica."""
    if degrees.shard == 1:
        return None
    names = ("pipe", "replica", "shard", "tp")
    if cube.shape[0] == cube.shape[3] == 1:
        whole = DeviceMesh(world.device.type, cube[0, :, :, 0], mesh_dim_names=names[1:3])
    else:
        whole = DeviceMesh(world.device.type, cube, mesh_dim_names=names)["replica", "shard"]
    return whole if degrees.replica > 1 else whole["shard"]
