"""Seconds of a forward and a backward pass: of the device, and of the host that asks for them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ..cluster.accelerator import Timer
from .agree import largest, mean, usual, usual_s

if TYPE_CHECKING:
    from ..runtime.mesh import World

T = TypeVar("T")

REPEATS = 5
REPEAT_S = 0.15  # long passes are repeated less often, but at least once
_FEW = 10  # passes by themselves, of which the first ones do not count
_UNCOUNTED = 3
# Long passes follow one another without a pause, as in training: a device that has rested runs
# faster than its power allows in the long run. The second half of so many seconds counts.
_LASTING_S = 0.3
_LONG_S = 1e-3  # shorter ones are no measure of that, nor those that wait for the host
_BEHIND = 1.2  # a device that takes so many times as long as its host does not wait for it
_MOST = 400
_HEAD_NUMBERS = 2**24


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
    """Seconds of a device's passes, and those that its host takes to ask for them."""

    forward_s: float
    backward_s: float
    host_forward_s: float = 0.0
    host_backward_s: float = 0.0

    @property
    def device_s(self) -> float:
        """Of both."""
        return self.forward_s + self.backward_s

    @property
    def host_s(self) -> float:
        """Of both."""
        return self.host_forward_s + self.host_backward_s


class HeadStart:
    """Work for a device, during which its host asks for passes: it then finds all of them there.

    Else short passes would take as long as the host takes to ask for them.
    """

    def __init__(self, world: World) -> None:
        import torch

        self._from = torch.zeros(_HEAD_NUMBERS, device=world.device)
        self._to = torch.empty_like(self._from)
        self._each_s = max(1e-5, usual_s(world, self._copy))
        self.asking = self._asking(world)

    def __call__(self, seconds: float) -> None:
        """Keep the device busy for so long at least."""
        for _ in range(min(_MOST, math.ceil(seconds / self._each_s))):
            self._copy()

    def _copy(self) -> None:
        self._to.copy_(self._from)

    @staticmethod
    def _asking(world: World) -> tuple[float, float]:
        """What the host takes for passes of next to nothing: timers, and autograd's beginning."""
        import torch

        leaf = torch.zeros(1, device=world.device, requires_grad=True)
        direction = torch.ones_like(leaf)
        found = []
        for _ in range(2 * _FEW):
            leaf.grad = None
            ran = ran_once(
                world, leaf.clone, lambda out: torch.autograd.backward([out], [direction])
            )
            found.append(ran.settled()[2:])
        forward_s, backward_s = mean(
            world, [usual(world, column) for column in zip(*found[_FEW:], strict=True)]
        )
        return forward_s, backward_s


def ran_once(world: World, forward: Callable[[], T], backward: Callable[[T], object]) -> Ran:
    """Ask for a forward pass, and for the backward pass of what it gives."""
    begun_s = time.perf_counter()
    with world.accelerator.work_timer() as there:
        out = forward()
    turned_s = time.perf_counter()
    with world.accelerator.work_timer() as back:
        backward(out)
    return Ran(there, back, turned_s - begun_s, time.perf_counter() - turned_s)


def timed(world: World, warm: Callable[[], Play], head: HeadStart | None) -> Passes | None:
    """Usual seconds, mean over processes; None if memory ran out on one.

    `warm` gives what is played; without `head` the host is the device.
    """
    import torch

    play: Play | None = None
    first: tuple[float, ...] = ()
    try:
        play = warm()
        first = play().settled()
    except torch.OutOfMemoryError:
        play = None
    if largest(world, float(play is None)) or play is None:
        return None
    if head is None:
        return _on_host(world, play, largest(world, sum(first[:2])))
    return _on_device(world, play, largest(world, sum(first[2:])), head)


def _on_host(world: World, play: Play, warm_s: float) -> Passes:
    """Processes that outnumber the cores of their host take turns on them."""
    repeats = min(REPEATS, max(1, int(REPEAT_S / max(warm_s, 1e-9))))
    world.barrier()
    asked = [play() for _ in range(repeats)]
    columns = zip(*(ran.settled()[:2] for ran in asked), strict=True)
    turns = max(1.0, world.n_local / world.accelerator.count())
    return Passes(*mean(world, [usual(world, column) * turns for column in columns]))


def _on_device(world: World, play: Play, asking_s: float, head: HeadStart) -> Passes:
    world.barrier()
    found = []
    for _ in range(_FEW):
        head(2 * asking_s)
        found.append(play().settled())
    columns = zip(*found[_UNCOUNTED:], strict=True)
    passes = Passes(*mean(world, [usual(world, column) for column in columns]))
    forward_s, backward_s = head.asking
    passes = passes._replace(
        host_forward_s=max(0.0, passes.host_forward_s - forward_s),
        host_backward_s=max(0.0, passes.host_backward_s - backward_s),
    )
    if passes.device_s < max(_LONG_S, _BEHIND * passes.host_s):
        return passes
    world.barrier()
    asked = [play() for _ in range(min(_MOST, max(1, int(_LASTING_S / passes.device_s))))]
    lasting = [ran.settled()[:2] for ran in asked][len(asked) // 2 :]
    columns = zip(*lasting, strict=True)
    forward_s, backward_s = mean(world, [usual(world, column) for column in columns])
    return passes._replace(forward_s=forward_s, backward_s=backward_s)
