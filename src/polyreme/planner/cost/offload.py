"""What lies in hosts' memory between uses: its way to the device and back, and its room there.

Of a layer that offloads its optimizer states these come to the device to be updated, and go back
(ZeRO-Offload, Ren et al., ATC 2021, with the update left on the device). One that offloads its
parameters has nothing on the device while it does not run: its parameters come for each of its
passes, the sum of its gradients comes to each backward pass but the first and goes back, and all
comes to be updated (ZeRO-Infinity, Rajbhandari et al., SC 2021).

What comes is what the device keeps otherwise: the copy that the layer computes in, or of what is
cut into shards the shard of the master, which is gathered then. Levels "optimizer" and "grads"
gather once a step and keep that, so that the shard comes once a step; at "optimizer" gradients are
summed whole on the device, and the shard of their sum goes once a step. A layer that is run again
stays for its backward pass. Nothing of this hides behind passes, exchanges or other layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ...plan.ir import Offload
from ..draft import Strategy
from ..shapes import LayerShapes, ParamShape
from .expert import dealt, shared

if TYPE_CHECKING:
    from .memory import Widths


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a layer that visit a device while the layer runs.

    Of parameters that are `whole` there, and of those that are `cut` into shards; and of gradients.
    """

    whole: int = 0
    cut: int = 0
    whole_gradients: int = 0
    cut_gradients: int = 0

    @property
    def n_bytes(self) -> int:
        """All of it at once, in a backward pass."""
        return self.whole + self.cut + self.whole_gradients + self.cut_gradients

    def moved_bytes(self, strategy: Strategy, rounds: int, *, reads: bool) -> tuple[float, float]:
        """Bytes on their way for a forward and for a backward pass, in the mean of `rounds`.

        `reads` says that the backward pass needs parameters.
        """
        once = strategy.level in ("optimizer", "grads")
        here = self.whole + (self.cut / rounds if once else self.cut)
        again = self.whole + (0 if once else self.cut)
        both_ways = 2 - 1 / rounds  # nothing is summed yet before the first
        cut_ways = 1 / rounds if strategy.level == "optimizer" else both_ways
        gradients = self.whole_gradients * both_ways + self.cut_gradients * cut_ways
        return here, (again if reads else 0) + gradients


def fetched(shapes: LayerShapes, strategy: Strategy, wide: Widths) -> Fetched:
    """What a layer that runs so fetches, parameters that it shares with other layers among it."""
    whole = cut = whole_gradients = cut_gradients = 0
    for param, parts in _held(shapes, strategy):
        if parts == 1 or param.special:
            whole += param.n_elements * (wide.master if param.special else wide.compute)
            whole_gradients += param.n_elements * wide.gradient * param.trainable
        else:
            elements = param.padded_elements(parts)
            cut += elements * (wide.resident or wide.master)
            cut_gradients += elements * wide.gradient * param.trainable
    return Fetched(
        whole=whole, cut=cut, whole_gradients=whole_gradients, cut_gradients=cut_gradients
    )


def _held(shapes: LayerShapes, strategy: Strategy) -> Iterator[tuple[ParamShape, int]]:
    """A device's parameters of a layer, each with the number of shards that it is cut into."""
    if strategy.ep == 1:
        yield from ((param, strategy.parts) for param in shapes.every)
        return
    yield from ((param, strategy.parts) for param in shared(shapes.every))
    parts = strategy.of_experts.parts
    yield from ((param, parts) for param in dealt(shapes.every, strategy.ep))


def updated_bytes(offload: Offload, wide: Widths, n_states: int) -> int:
    """Bytes of a trainable element that come to the device to be updated; no more go back."""
    if offload == "none":
        return 0
    states = n_states * wide.master
    return states if offload == "optimizer" else states + wide.master + wide.gradient
