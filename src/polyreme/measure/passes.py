"""Seconds of a forward and a backward pass: of the device, and of the host that asks for them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..cluster.accelerator import Timer
from .agree import largest, mean, usual, usual_s

if TYPE_CHECKING:
    from ..runtime.mesh import World

T = TypeVar("T")

REPEATS = 5
REPEAT_S = 0.15  # long passes are repeated less often, but at least once
_FEW = 7  # passes by themselves, of which the first ones do not count
_UNCOUNTED = 2
_IN_A_ROW = 20  # passes of whose hosts the second half counts
# Long passes follow one another without a pause, as in training: a device that has rested runs
# faster than its power allows in the long run, and then goes up and down within a second. The mean
# over the second half of so many seconds counts.
LASTING_S = 2.0
LASTING_LEAST_S = 0.5
_LONG_S = 1e-3  # shorter ones are no measure of that, nor those that wait for the host
_BEHIND = 1.2  # a device that takes so many times as long as its host does not wait for it
_MOST = 400
_MOST_LASTING = 2000
_HEAD_NUMBERS = 2**26
_HOST_HEAD_NUMBERS = 2**20


class Ran(NamedTuple):
    """Both passes: what the device took, and how long the host asked for them."""

    forward: Timer
    backward: Timer
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    def settled(self) -> tuple[float, ...]:
        """All four in seconds, once the device is through."""
        device_s = self.forward.settle(), self.backward.settle()
        return (*device_s, self.host_forward_s, self.host_backward_s)


Play = Callable[[], Ran]


class Passes(NamedTuple):
    """Seconds of a device's passes; `host_s` those in which its host asked for each by itself.

    They take `longer` times as long as those of a rested device (None: nobody knows).
    """

    forward_s: float
    backward_s: float
    host_s: float = 0.0
    longer: float | None = None

    @property
    def device_s(self) -> float:
        """Of both."""
        return self.forward_s + self.backward_s

    @property
    def waits(self) -> bool:
        """Whether the device will wait for its host."""
        return self.device_s < _BEHIND * self.host_s

    def lasting(self, longer: float) -> Passes:
        """The same of a device that is so many times as slow as a rested one."""
        return Passes(longer * self.forward_s, longer * self.backward_s, self.host_s, longer)


class HeadStart:
    """Work for a device, during which its host asks for passes: it then finds all of them there.

    Else short passes would take as long as the host takes to ask for them.
    """

    def __init__(self, world: World) -> None:
        import torch

        numbers = _HOST_HEAD_NUMBERS if world.device.type == "cpu" else _HEAD_NUMBERS
        self._from = torch.zeros(numbers, device=world.device)
        self._to = torch.empty_like(self._from)
        self._each_s = max(1e-5, usual_s(world, self._copy))
        leaf = torch.zeros(1, device=world.device, requires_grad=True)
        direction = torch.ones_like(leaf)

        def back(out: torch.Tensor) -> None:
            torch.autograd.backward([out], [direction])
            leaf.grad = None

        # Of next to nothing: what timers take, and autograd's beginning.
        self._nothing_s = _in_a_row(world, lambda: ran_once(world, leaf.clone, back))

    def __call__(self, seconds: float) -> None:
        """Keep the device busy for so long at least."""
        for _ in range(min(_MOST, math.ceil(seconds / self._each_s))):
            self._copy()

    def host_s(self, world: World, play: Play) -> tuple[float, float]:
        """What the host takes to ask for a forward and a backward pass, one after another."""
        found = _in_a_row(world, play)
        forward_s, backward_s = (
            max(0.0, each - nothing) for each, nothing in zip(found, self._nothing_s, strict=True)
        )
        return forward_s, backward_s

    def _copy(self) -> None:
        self._to.copy_(self._from)


def _in_a_row(world: World, play: Play) -> tuple[float, ...]:
    """The device is through with each before the next: else a host waits for room in its queue."""
    world.barrier()
    settled = [play().settled() for _ in range(_IN_A_ROW)]
    columns = zip(*(ran[2:] for ran in settled[_IN_A_ROW // 2 :]), strict=True)
    return mean(world, [usual(world, column) for column in columns])


def ran_once(world: World, forward: Callable[[], T], backward: Callable[[T], object]) -> Ran:
    """Ask for a forward pass, and for the backward pass of what it gives."""
    begun_s = time.perf_counter()
    with world.accelerator.work_timer() as there:
        out = forward()
    turned_s = time.perf_counter()
    with world.accelerator.work_timer() as back:
        backward(out)
    return Ran(there, back, turned_s - begun_s, time.perf_counter() - turned_s)


def timed(
    world: World,
    ways: Sequence[Callable[[], Play]],
    head: HeadStart | None,
    lasting_s: float = LASTING_S,
) -> list[Passes] | None:
    """Usual seconds of each way, mean over processes; None if memory ran out on one.

    A way gives what is played, warm. Without `head` the host is the device. Long ones together
    are played for `lasting_s`.
    """
    import torch

    plays: list[Play] = []
    first: list[tuple[float, ...]] = []
    try:
        for way in ways:
            plays.append(way())
            first.append(plays[-1]().settled())
    except torch.OutOfMemoryError:
        plays.clear()
    if largest(world, float(not plays)) or not plays:
        return None
    if head is None:
        warm_s = [largest(world, sum(each[:2])) for each in first]
        return [_on_host(world, play, each_s) for play, each_s in zip(plays, warm_s, strict=True)]
    asking_s = [largest(world, sum(each[2:])) for each in first]
    found = [
        _on_device(world, play, each_s, head) for play, each_s in zip(plays, asking_s, strict=True)
    ]
    return _lasting(world, plays, found, lasting_s)


def _on_host(world: World, play: Play, warm_s: float) -> Passes:
    """Processes that outnumber the cores of their host take turns on them."""
    repeats = min(REPEATS, max(1, int(REPEAT_S / max(warm_s, 1e-9))))
    world.barrier()
    asked = [play() for _ in range(repeats)]
    columns = zip(*(ran.settled()[:2] for ran in asked), strict=True)
    turns = max(1.0, world.n_local / world.accelerator.count())
    forward_s, backward_s = mean(world, [usual(world, column) * turns for column in columns])
    return Passes(forward_s, backward_s)


def _on_device(world: World, play: Play, asking_s: float, head: HeadStart) -> Passes:
    """Passes of which each finds all asked for when it begins."""
    world.barrier()
    ran = []
    for _ in range(_FEW):
        head(1.5 * asking_s)
        ran.append(play().settled())
    columns = zip(*ran[_UNCOUNTED:], strict=True)
    there_s, back_s, *host_s = mean(world, [usual(world, each) for each in columns])
    return Passes(there_s, back_s, sum(host_s))


def _lasting(
    world: World, plays: Sequence[Play], found: list[Passes], lasting_s: float
) -> list[Passes]:
    """All long ways that no host holds up, in turn, so that the device is as warm for each.

    The others take longer by as much as these do together.
    """
    long = [n for n, each in enumerate(found) if each.device_s >= _LONG_S and not each.waits]
    if not long:
        return found
    rested_s = sum(found[n].device_s for n in long)
    repeats = min(_MOST_LASTING, max(1, int(lasting_s / rested_s)))
    world.barrier()
    asked = [[plays[n]() for n in long] for _ in range(repeats)]
    lasting = list(found)
    for n, own in zip(long, zip(*asked, strict=True), strict=True):
        settled = [ran.settled()[:2] for ran in own][repeats // 2 :]
        columns = zip(*settled, strict=True)
        forward_s, backward_s = mean(world, [statistics.fmean(column) for column in columns])
        longer = (forward_s + backward_s) / found[n].device_s
        lasting[n] = Passes(forward_s, backward_s, found[n].host_s, longer)
    longer = sum(lasting[n].device_s for n in long) / rested_s
    return [each if n in long else each.lasting(longer) for n, each in enumerate(lasting)]
