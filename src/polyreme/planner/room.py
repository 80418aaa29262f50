"""Whether a draft fits: what the tightest device has, and what it needs by cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from ..cluster.types import Cluster
from ..plan.ir import OFFLOADED
from ..profile.record import Profile
from .cost.memory import Memory, Storage
from .draft import Draft, Strategy


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the device that is tightest."""

    device: int
    have_bytes: int
    need_bytes: Mapping[str, int]

    @property
    def over_bytes(self) -> int:
        """Bytes beyond what there is; negative when there is room."""
        return sum(self.need_bytes.values()) - self.have_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits."""
        return self.over_bytes <= 0

    @property
    def largest_cause(self) -> str:
        """What takes most."""
        return max(self.need_bytes, key=lambda cause: self.need_bytes[cause])


class Fitting:
    """Rooms of drafts on the first devices of a cluster."""

    def __init__(self, memory: Memory, profile: Profile, cluster: Cluster) -> None:
        self.memory = memory
        self.profile = profile
        self.cluster = cluster
        self.have_bytes = [
            cluster.device_types[host.device_type].memory_bytes
            for host in cluster.hosts
            for _ in range(host.n_devices)
        ]

    def __call__(self, draft: Draft) -> Room:
        """Bytes that the tightest device, or host, has and needs."""
        rooms = [self.tightest(draft), *self.hosts(draft)]
        return max(rooms, key=lambda room: room.over_bytes)

    def hosts(self, draft: Draft) -> Iterator[Room]:
        """Of each host whose memory is known, what its devices keep there."""
        if not draft.offloads:
            return
        first = 0
        for host in self.cluster.hosts:
            devices = range(first, min(first + host.n_devices, draft.n_devices))
            first += host.n_devices
            if host.memory_bytes is None or not devices:
                continue
            kept = (self.on_host(draft, *self._place(draft, each)) for each in devices)
            held = sum(kept, Storage())
            yield Room(
                device=devices[0],
                have_bytes=host.memory_bytes,
                need_bytes={
                    f"{cause} in the memory of {host.name}": n_bytes
                    for cause in held.__struct_fields__
                    if (n_bytes := getattr(held, cause))
                },
            )

    def on_host(self, draft: Draft, pipe: int, shard_index: int) -> Storage:
        """Bytes that a device keeps in its host's memory."""
        total = Storage()
        for name in draft.layers_of(pipe):
            strategy = draft.strategies[name]
            if strategy.offload != "none":
                here = msgspec.structs.replace(strategy, offload="none")
                held = self._memory_of(here).layer_storage(name, here, shard_index)
                causes = OFFLOADED[strategy.offload]
                total += Storage(**{cause: getattr(held, cause) for cause in causes})
        return total

    def _memory_of(self, _: Strategy) -> Memory:
        return self.memory

    def tightest(self, draft: Draft) -> Room:
        """Of the tightest device.

        A device needs the more the lower its index on the shard axis, so that of each device type
        the lowest index is tightest.
        """
        lowest: dict[tuple[int, int], tuple[int, int]] = {}
        first = 0
        for host in self.cluster.hosts:
            have_bytes = self.cluster.device_types[host.device_type].memory_bytes
            for device in range(first, min(first + host.n_devices, draft.n_devices)):
                pipe, index = self._place(draft, device)
                here = (index, device)
                key = (have_bytes, pipe)
                lowest[key] = min(lowest.get(key, here), here)
            first += host.n_devices
        rooms = [
            Room(
                device=device,
                have_bytes=have_bytes,
                need_bytes=self.memory.causes(draft, self.profile, shard_index, pipe),
            )
            for (have_bytes, pipe), (shard_index, device) in lowest.items()
        ]
        return max(rooms, key=lambda room: room.over_bytes)

    def shortfalls(self, draft: Draft) -> tuple[int, ...]:
        """Bytes that the fullest device of each pipeline rank lacks; below 0: has left."""
        n, have = draft.strategy.n_devices, self.have_bytes
        return tuple(
            sum(self.memory.causes(draft, self.profile, 0, pipe).values())
            - min(have[pipe * n : pipe * n + n])
            for pipe in range(draft.pp)
        )

    def by_device(self, draft: Draft) -> tuple[Mapping[str, int], ...]:
        """Peak bytes by cause of every device of a draft; equal devices share one mapping."""
        rows: dict[tuple[int, int], Mapping[str, int]] = {}
        found = []
        for device in range(draft.n_devices):
            pipe, index = self._place(draft, device)
            if (pipe, index) not in rows:
                rows[pipe, index] = self.memory.causes(draft, self.profile, index, pipe)
            found.append(rows[pipe, index])
        return tuple(found)

    def _place(self, draft: Draft, device: int) -> tuple[int, int]:
        """Pipeline rank and index on the shard axis."""
        strategy = draft.strategy
        pipe, place = divmod(device, strategy.n_devices)
        return pipe, place // (strategy.tp * strategy.cp) % strategy.shard
