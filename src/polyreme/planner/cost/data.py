"""Time of a step over the data axes: compute, collectives, and what of these stays exposed."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ...cluster.types import Cluster
from ...plan.grid import Degrees
from ...plan.ir import BUCKET_BYTES
from ...profile.fit import Asked, Fit
from ...profile.record import Profile
from ..draft import Draft, Strategy
from ..groups import Groups
from .memory import Memory
from .message import Message, Over
from .offload import updated_bytes
from .traffic import Traffic
from .unit import Unit


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step and what they are made of; `step_s` counts exposed communication only.

    The update, `update_s`, is part of `compute_s`.
    """

    compute_s: float
    comm_s: float
    exposed_comm_s: float
    update_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.compute_s + self.exposed_comm_s


class RankTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a pipeline rank, or of a layer: its update, and what it exchanges unhidden."""

    update_s: float
    exposed_comm_s: float


_Units = Iterable[tuple[Strategy, Unit, int, bool]]  # how it runs, how many, whether one stays


class _Parts(msgspec.Struct, kw_only=True):
    """Seconds of communication by the part of a step in which it runs."""

    gather_once: float = 0.0
    gather_forward: float = 0.0  # in each forward pass
    gather_backward: float = 0.0  # again in each backward pass
    reduce_each: float = 0.0  # in each backward pass
    reduce_last: float = 0.0  # in the last one
    first_gather: float = 0.0  # nothing runs that could hide these two
    last_reduce: float = 0.0

    def comm_s(self, rounds: int) -> float:
        """All of it."""
        each = self.gather_forward + self.gather_backward + self.reduce_each
        return self.gather_once + rounds * each + self.reduce_last

    def exposed_s(self, rounds: int, forward_s: float, backward_s: float, hides: _Hides) -> float:
        """What computation does not hide: of each part the share of its kind can be hidden.

        That share is measured with both running, so it holds what each slows the other down.
        """

        def exposed(
            gather_s: float, reduce_s: float, beside_s: float, alone_s: float = 0.0
        ) -> float:
            comm_s = gather_s + reduce_s
            hidden_s = gather_s * hides.gathers + reduce_s * hides.reductions
            return max(comm_s - min(hidden_s, beside_s), min(alone_s, comm_s))

        again, each = self.gather_backward, self.reduce_each
        return (
            exposed(self.gather_once + self.gather_forward, 0.0, forward_s, self.first_gather)
            + (rounds - 1) * exposed(self.gather_forward, 0.0, forward_s)
            + (rounds - 1) * exposed(again, each, backward_s)
            + exposed(again, each + self.reduce_last, backward_s, self.last_reduce)
        )


class _Hides(msgspec.Struct, frozen=True):
    """Shares of gathers and of reductions that can run behind computation."""

    gathers: float
    reductions: float


class DataCost:
    """Seconds of a step of any draft on a cluster's first devices."""

    def __init__(self, memory: Memory, profile: Profile, cluster: Cluster) -> None:
        self.memory = memory
        self.profile = profile
        self.traffic = Traffic(memory)
        self._fit = Fit(profile)
        self.host_of = [
            index for index, host in enumerate(cluster.hosts) for _ in range(host.n_devices)
        ]
        types = [cluster.device_types[host.device_type] for host in cluster.hosts]
        self._to_host_bytes_s = min(each.host_bandwidth_bytes_s or 0.0 for each in types)
        self._asked = functools.cache(self._fit.asked)
        self._n_hosts = functools.cache(self._hosts_of_groups)

    def __call__(self, draft: Draft) -> StepTime:
        """Seconds of one step on the data rank that has most samples."""
        groups = self.memory.classes.groups(draft)
        sizes = draft.microbatch_sizes
        passes = {size: self._pass_s(groups, size) for size in sizes}
        compute_s = sum(sum(passes[size]) * count for size, count in sizes.items())
        units = [
            (strategy, unit, n, (index, strategy) == groups.tail)
            for index, strategy, n in groups.units
            for unit in self.memory.units(index, strategy)
        ]
        names = tuple(draft.strategies)
        sharded, bucketed = self._sharded(units), self._bucketed(draft, names)
        rounds = draft.microbatches
        update_s = self._update_s(units, rounds)
        return StepTime(
            compute_s=compute_s + update_s,
            comm_s=sharded.comm_s(rounds) + bucketed.comm_s(rounds),
            exposed_comm_s=self._exposed_s(draft, sharded, bucketed, passes[min(sizes)]),
            update_s=update_s,
        )

    def passes(self, draft: Draft, names: Sequence[str]) -> tuple[float, float]:
        """Forward and backward seconds of layers, not split over tensor parts.

        Of a microbatch of the largest size.
        """
        return self._pass_s(self.memory.classes.groups(draft, names), draft.microbatch)

    def rank(self, draft: Draft, pipe: int) -> RankTime:
        """What a pipeline rank takes for its update, and for what its data axes exchange."""
        names = draft.layers_of(pipe)
        units = [
            (strategy, unit, 1, held.stays)
            for held in self.traffic.held(names).units
            for strategy in (draft.strategies[held.layers[0]],)
            for unit in self.traffic.units(held, strategy)
        ]
        return RankTime(
            update_s=self._update_s(units, draft.microbatches),
            exposed_comm_s=self._exposed_s(
                draft, self._sharded(units), self._bucketed(draft, names), self.passes(draft, names)
            ),
        )

    def layer_s(
        self, name: str, strategy: Strategy, pp: int, microbatches: int, size: int, draft: Draft
    ) -> float:
        """Seconds a step of what a layer exchanges over data axes, unhidden, and of its update."""
        once = self.layer_once(name, strategy, pp, size, draft)
        return once.exposed_comm_s + once.update_s

    def layer_once(
        self, name: str, strategy: Strategy, pp: int, size: int, draft: Draft
    ) -> RankTime:
        """What a layer takes for its update, and for what it exchanges over data axes, a step.

        As if nothing but its own passes could hide them; buckets are taken to be full.
        """
        is_last = name == self.memory.graph.layers[-1].name
        units = self.memory.layer_units(name, strategy)
        sharded = self._sharded([(strategy, unit, 1, is_last) for unit in units])
        sharded.first_gather = sharded.last_reduce = 0.0
        bucketed, close = _Parts(), draft.bucket_bytes or BUCKET_BYTES
        for unit in units:
            n_ranks = strategy.sharers // (strategy.ep if unit.experts else 1)
            if n_ranks > 1:
                message = Message(
                    operation="all_reduce",
                    over="data",
                    n_ranks=n_ranks,
                    n_bytes=close,
                    ep=strategy.ep if unit.experts else 1,
                )
                n_bytes = unit.loose * self.memory.widths.master
                bucketed.reduce_last += self.price_s(strategy, pp, message) * n_bytes / close
        passes = self.layer_passes(name, strategy, size)
        return RankTime(
            update_s=self._update_s(
                [(strategy, unit, 1, False) for unit in units], draft.microbatches
            ),
            exposed_comm_s=self._exposed_s(draft, sharded, bucketed, passes),
        )

    def layer_passes(
        self, name: str, strategy: Strategy, size: float, parts: int = 1
    ) -> tuple[float, float]:
        """Forward and backward seconds of a layer's microbatch; recomputing counts as backward.

        Of one of so many tensor `parts` that share the layer.
        """
        return self.layer_asked(name, strategy, size, parts).lasting

    def layer_asked(self, name: str, strategy: Strategy, size: float, parts: int = 1) -> Asked:
        """The same with what the host takes apart, so that layers of a stage add up."""
        return self._class_asked(self.memory.classes.layer_of[name], strategy, size, parts)

    def hosted_s(self, name: str, strategy: Strategy, rounds: int) -> tuple[float, float]:
        """Forward and backward seconds of what comes from the host's memory and goes back.

        A microbatch, in the mean of `rounds` of them.
        """
        if not strategy.fetches:
            return 0.0, 0.0
        shapes = self.memory.classes.shapes[name]
        there, back = self.memory.fetched(name, strategy).moved_bytes(
            strategy, rounds, reads=strategy.recompute or not shapes.looks_up
        )
        return there / self._to_host_bytes_s, back / self._to_host_bytes_s

    def price_s(self, layout: Strategy, pp: int, message: Message) -> float:
        """Seconds of one message.

        Stages lie one behind the other on the devices, in each of them tensor parts beside each
        other, then those that share tokens, then shards, then replicas. Holders of a parameter are
        taken to lie on one host.
        """
        most = max(1, len(self.host_of) // layout.n_devices)  # stages may have unlike numbers
        degrees = layout.degrees
        if message.ep != degrees.ep:
            degrees = msgspec.structs.replace(degrees, ep=message.ep)
        hosts = self._n_hosts(degrees, min(pp, most))
        if message.operation == "send":
            return self._fit.send_s(pp, message.n_bytes, hosts["stages"])
        if message.operation == "all_to_all":
            return self._fit.all_to_all_s(message.n_ranks, message.n_bytes, hosts["experts"])
        return self._fit.collective_s(
            message.operation, message.n_ranks, message.n_bytes, hosts.get(message.over)
        )

    def _exposed_s(
        self, draft: Draft, sharded: _Parts, bucketed: _Parts, passes: tuple[float, float]
    ) -> float:
        """What passes over a microbatch (forward and backward seconds) do not hide."""
        measured, reductions = self.profile.overlap, self.profile.sharded_overlap
        of_units = _Hides(
            measured if draft.prefetch else 0.0, measured if reductions is None else reductions
        )
        later = measured if self.memory.workload.by_entry else 0.0
        of_buckets = _Hides(later, measured if draft.overlap else 0.0)
        return sharded.exposed_s(draft.microbatches, *passes, of_units) + bucketed.exposed_s(
            draft.microbatches, *passes, of_buckets
        )

    def _pass_s(self, groups: Groups, size: int) -> tuple[float, float]:
        """Of all of them, one microbatch."""
        found = Asked(0.0, 0.0)
        for index, strategy, count in groups.layers:
            found = found.plus(self._class_asked(index, strategy, size), count)
        return found.lasting

    def _class_asked(self, index: int, strategy: Strategy, size: float, parts: int = 1) -> Asked:
        kind = self.memory.classes.layers[index].kind
        return self._asked(kind, size / strategy.cp, parts, recompute=strategy.recompute)

    def _update_s(self, units: _Units, rounds: int) -> float:
        """Seconds of the optimizer, and of sums of gradients, on the device that holds most.

        What is reduced with each microbatch is not added to what came before. What lies in the
        host's memory comes and goes at once, in either direction, while it computes.
        """
        here = first = more = moved_bytes = 0
        wide, states = self.memory.widths, self.memory.workload.optimizer_states
        for strategy, unit, count, _ in units:
            elements = (unit.loose + math.ceil(unit.reduced / unit.parts)) * count
            here += elements
            whole = unit.loose + unit.trained if unit.parts > 1 else unit.loose
            each = unit.trained if strategy.level in ("grads", "params") and unit.parts > 1 else 0
            first += (whole + each * (rounds - 1)) * count
            more += (whole - each) * (rounds - 1) * count
            moved_bytes += elements * updated_bytes(strategy.offload, wide, states)
        profile = self.profile
        computed_s = here * wide.master * profile.optimizer_s_per_byte + wide.gradient * (
            first * profile.gradient_s_per_byte + more * profile.more_gradient_s_per_byte
        )
        if not moved_bytes:
            return computed_s
        assert self._to_host_bytes_s, "offered only where that is known"
        return max(computed_s, moved_bytes / self._to_host_bytes_s)

    def _sharded(self, units: _Units) -> _Parts:
        traffic = _Parts()
        for strategy, unit, count, stays in units:
            if unit.parts > 1 and unit.gathered:
                self._add_units(traffic, strategy, unit, count, stays)
        return traffic

    def _add_units(
        self, traffic: _Parts, strategy: Strategy, unit: Unit, count: int, is_tail: bool
    ) -> None:
        """Gathered in the compute dtype, reduced in the master's; over replicas once a step.

        One of the units may be the tail, which is not gathered again.
        """
        wide, degrees = self.memory.widths, strategy.degrees
        if strategy.ep > 1:
            degrees = degrees if unit.experts else degrees.alone
            strategy = strategy.of_experts if unit.experts else strategy
        hosts = self._n_hosts(degrees, 1)
        shard_hosts, replica_hosts = hosts["shards"], hosts["replicas"]
        collective_s = self._fit.collective_s
        gathered_bytes, reduced_bytes = unit.gathered * wide.compute, unit.reduced * wide.master
        gather_s = collective_s("all_gather", strategy.shard, gathered_bytes, shard_hosts)
        reduce_s = collective_s("reduce_scatter", strategy.shard, reduced_bytes, shard_hosts)
        part_bytes = reduced_bytes // unit.parts
        replicas_s = collective_s("all_reduce", strategy.copies, part_bytes, replica_hosts)
        if strategy.level == "params":
            traffic.gather_forward += gather_s * count
            again = count - is_tail if unit.gathered_again(strategy) else 0
            traffic.gather_backward += gather_s * again
        else:
            traffic.gather_once += gather_s * count
        if strategy.level == "optimizer":
            traffic.reduce_last += reduce_s * count
        else:
            traffic.reduce_each += reduce_s * count
        traffic.reduce_last += replicas_s * count
        if not traffic.first_gather:
            traffic.first_gather = gather_s
            traffic.last_reduce = reduce_s + replicas_s

    def _bucketed(self, draft: Draft, names: tuple[str, ...]) -> _Parts:
        """Gradients that are whole on every device: summed in buckets, once a step."""
        traffic = _Parts()
        found = self.traffic.buckets(draft, names)
        price_s = {each: self.price_s(draft.strategy, draft.pp, each) for each in set(found)}
        gathers = [price_s[each] for each in found if each.operation == "all_gather"]
        reductions = [price_s[each] for each in found if each.operation != "all_gather"]
        if reductions:
            traffic.reduce_last, traffic.last_reduce = sum(reductions), reductions[-1]
        if gathers:
            # The first layers' come last unless they have priority.
            traffic.gather_once = sum(gathers)
            traffic.first_gather = gathers[-1] if draft.priority else sum(gathers)
        return traffic

    def _hosts_of_groups(self, degrees: Degrees, pp: int) -> Mapping[Over, int]:
        """Over how many hosts groups of the first devices spread at most, by who is in them.

        Where experts are dealt out, shards, replicas and data are those who hold the same ones.
        """
        shards, contexts = degrees.ep_shards, degrees.ep_contexts
        inner = [degrees.replica, degrees.shard // shards, shards]
        inner += [degrees.cp // contexts, contexts, degrees.tp]
        grid = np.array(self.host_of[: degrees.n_devices * pp]).reshape(pp, *inner)
        groups: dict[Over, tuple[int, ...]] = {
            "parts": (6,),
            "contexts": (4, 5),
            "shards": (2,),
            "replicas": (1, 4),
            "data": (1, 2, 4),
        }
        if degrees.ep > 1:
            groups["experts"] = (3, 5)
        found: dict[Over, int] = {"holders": 1, "stages": 1}
        for over, axes in groups.items():
            last = np.moveaxis(grid, axes, range(-len(axes), 0))
            members = last.reshape(-1, math.prod(last.shape[-len(axes) :]))
            found[over] = 1 + int((np.diff(np.sort(members)) != 0).sum(axis=1).max(initial=0))
        if pp > 1 and (grid[1:] != grid[:-1]).any():
            found["stages"] = 2
        return found
