"""A plan's devices as a grid: pipeline ranks, of replicas, shards, contexts and tensor parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from .ir import Leaf, Plan, ShardTree, Split, devices

INNER_AXES = ("replica", "shard", "cp", "tp")  # of a stage, outermost first


class Degrees(msgspec.Struct, frozen=True, kw_only=True):
    """Into how many parts each axis of a stage cuts it.

    `ep` is no further axis: of shards x contexts, so many next to each other have the experts of a
    layer dealt out among them.
    """

    replica: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def n_devices(self) -> int:
        """Devices of the stage."""
        return self.replica * self.shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """Devices that share the batch; those that share its samples count as one of them."""
        return self.replica * self.shard

    @property
    def alone(self) -> Degrees:
        """The same without experts dealt out: where samples, tokens and tensors lie."""
        return msgspec.structs.replace(self, ep=1) if self.ep > 1 else self

    @property
    def ep_contexts(self) -> int:
        """Of those among whom experts are dealt out, how many have tokens of the same samples."""
        return math.gcd(self.ep, self.cp)

    @property
    def ep_shards(self) -> int:
        """Of these, how many have samples of their own; as many contexts of each take part."""
        return self.ep // self.ep_contexts

    @property
    def nested(self) -> tuple[tuple[str, int], ...]:
        """Axes of a split and their degrees, outermost first, those that do not cut left out.

        Experts cut an axis in two, the inner part called ``ep``: the shards', or the contexts',
        or both. Contexts that all take part leave a ``cp`` of one, which tells these from shards.
        """
        shards, contexts = self.ep_shards, self.ep_contexts
        found = (
            ("replica", self.replica),
            ("shard", self.shard // shards),
            ("ep", shards),
            ("cp", self.cp // contexts),
            ("ep", contexts),
            ("tp", self.tp),
        )
        return tuple((axis, n) for axis, n in found if n > 1 or (axis == "cp" and contexts > 1))


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Where a device lies in the grid."""

    pipe: int = 0
    replica: int = 0
    shard: int = 0
    cp: int = 0
    tp: int = 0


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Devices of a plan by pipeline rank, however its layers are split over them.

    `pipes` holds the devices of each pipeline rank, in the order of the splits; `holders` the
    pipeline ranks of each stage, one for each of its placements.
    """

    pipes: tuple[tuple[int, ...], ...]
    holders: tuple[tuple[int, ...], ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.pipes)

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices, pipeline rank by pipeline rank."""
        return tuple(device for row in self.pipes for device in row)

    def stages_of(self, pipe: int) -> tuple[int, ...]:
        """Stages that a pipeline rank holds, in any of their copies."""
        return tuple(stage for stage, pipes in enumerate(self.holders) if pipe in pipes)


class Grid(Rows, frozen=True, kw_only=True):
    """Devices of a plan whose layers are all split alike.

    Those of a pipeline rank lie replica by replica, in it shard by shard, in it by the tokens that
    they have, and the tensor parts of these side by side.
    """

    degrees: Degrees

    @property
    def replica(self) -> int:
        """Complete copies of the model."""
        return self.degrees.replica

    @property
    def shard(self) -> int:
        """Devices of a replica that share its batch."""
        return self.degrees.shard

    @property
    def tp(self) -> int:
        """Parts of a tensor."""
        return self.degrees.tp

    @property
    def cp(self) -> int:
        """Devices that share the tokens of each sample."""
        return self.degrees.cp

    def cell(self, device: int) -> Cell:
        """Where a device lies; ValueError if it is not part of the grid."""
        pipe, place = divmod(self.devices.index(device), self.degrees.n_devices)
        place, tp = divmod(place, self.tp)
        data, cp = divmod(place, self.cp)
        replica, shard = divmod(data, self.shard)
        return Cell(pipe=pipe, replica=replica, shard=shard, cp=cp, tp=tp)

    def data_rank(self, device: int) -> int:
        """Which share of every batch is the device's."""
        cell = self.cell(device)
        return cell.replica * self.shard + cell.shard

    def of_replica(self, replica: int) -> Grid:
        """The grid of one replica."""
        degrees = msgspec.structs.replace(self.degrees, replica=1)
        n = degrees.n_devices
        rows = tuple(row[replica * n : (replica + 1) * n] for row in self.pipes)
        return Grid(degrees=degrees, pipes=rows, holders=self.holders)


def even_split(devices: Sequence[int], degrees: Degrees) -> ShardTree:
    """The devices as replicas of shards and so on; an axis that cuts nothing adds no node.

    >>> even_split((4, 5), Degrees(tp=2)).axis
    'tp'
    """
    assert degrees.n_devices == len(devices), "degrees must multiply to the devices"
    nodes: list[ShardTree] = [Leaf(device) for device in devices]
    for axis, n in reversed(degrees.nested):
        nodes = [
            Split(axis=axis, weights=(1,) * n, children=tuple(nodes[first : first + n]))
            for first in range(0, len(nodes), n)
        ]
    return nodes[0]


def even_degrees(split: ShardTree) -> Degrees | None:
    """The degrees of such a split; None where other axes, another nesting or uneven parts occur."""
    path = tuple(_first_path(split))
    if {axis for axis, _ in path} - {*INNER_AXES, "ep"}:
        return None
    n_of = {axis: math.prod(n for name, n in path if name == axis) for axis in INNER_AXES}
    dealt: dict[str, int] = {"shard": 1, "cp": 1}
    outer = "shard"  # an axis that experts cut is the outer one of two
    for axis, n in path:
        outer = "cp" if axis == "cp" else outer
        if axis == "ep":
            dealt[outer] *= n
    found = Degrees(
        replica=n_of["replica"],
        shard=n_of["shard"] * dealt["shard"],
        cp=n_of["cp"] * dealt["cp"],
        tp=n_of["tp"],
        ep=math.prod(dealt.values()),
    )
    named = devices(split)
    if found.n_devices != len(named) or split != even_split(named, found):
        return None
    return found


def _first_path(split: ShardTree) -> Iterator[tuple[str, int]]:
    """Axes and numbers of children from the root to the first leaf."""
    while isinstance(split, Split):
        yield split.axis, len(split.children)
        split = split.children[0]


def rows_of(plan: Plan) -> Rows | None:
    """The rows of a plan; None where stages share some devices only, or layers lie elsewhere.

    Rows may be of different length; those of one stage are not.
    """
    first = [placement for stage in plan.stages for placement in stage.placements[:1]]
    others = [placement for stage in plan.stages for placement in stage.placements[1:]]
    pipes = list(dict.fromkeys((*first, *others)))
    holders = [
        tuple(pipes.index(placement) for placement in stage.placements) for stage in plan.stages
    ]
    named = [device for row in pipes for device in row]
    missing = any(name not in plan.layer_plans for stage in plan.stages for name in stage.layers)
    if len(set(named)) != len(named) or not pipes or missing:
        return None
    placed = {
        (id(split), stage.placements[0]): split
        for stage in plan.stages
        for name in stage.layers
        for split in (plan.layer_plans[name].split,)
    }
    if any(devices(split) != placement for (_, placement), split in placed.items()):
        return None
    if any(len(set(map(len, stage.placements))) > 1 for stage in plan.stages):
        return None
    return Rows(pipes=tuple(pipes), holders=tuple(holders))


def grid_of(plan: Plan) -> Grid | None:
    """The grid of a plan; None where it has no rows, or layers are split unlike.

    Who has which experts changes nothing of where samples and tokens lie, and is left out.
    """
    rows = rows_of(plan)
    if rows is None:
        return None
    splits = [plan.layer_plans[name].split for stage in plan.stages for name in stage.layers]
    whole = (even_degrees(split) for split in {id(each): each for each in splits}.values())
    found = {each and each.alone for each in whole}
    degrees = found.pop() if len(found) == 1 else None
    if degrees is None:
        return None
    return Grid(degrees=degrees, pipes=rows.pipes, holders=rows.holders)
