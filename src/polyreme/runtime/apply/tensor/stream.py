"""Random numbers that differ between tensor parts, between numbers that do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd as Dropout

_FACTOR = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: seeds of neighbouring ranks lie far apart


class Stream:
    """Numbers of one part's own, from `enter` to `leave`; afterwards all parts' go on in step.

    The seed is drawn from the host's generator, which is the same on all parts. A pass that is
    cut short (recomputation stops where it has what it needs) may leave out `leave`: whoever
    stops it restores the generators.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kept: torch.Tensor | None = None
        self._device = torch.device("cpu")

    def enter(self, device: torch.device) -> None:
        """Go over to this part's own numbers on the device."""
        draw = torch.randint(2**62, (), device="cpu", generator=torch.default_generator)
        seed = (int(draw) + self._rank * _FACTOR) % 2**63
        self._device = device
        if device.type == "cpu":
            self._kept = torch.default_generator.get_state()
            torch.default_generator.manual_seed(seed)
        else:
            backend = torch.get_device_module(device)
            self._kept = backend.get_rng_state(device)
            with backend.device(device):
                backend.manual_seed(seed)

    def skip(self) -> None:
        """A pass that draws nothing."""
        self._kept = None

    def swap(self) -> None:
        """From this part's own numbers to those of all parts, or back."""
        if self._kept is None:
            return
        kept = self._kept
        if self._device.type == "cpu":
            self._kept = torch.default_generator.get_state()
            torch.default_generator.set_state(kept)
        else:
            backend = torch.get_device_module(self._device)
            self._kept = backend.get_rng_state(self._device)
            backend.set_rng_state(kept, self._device)

    def leave(self) -> None:
        """Go back to the numbers of all parts."""
        self.swap()
        self._kept = None


def drops(module: nn.Module) -> bool:
    """Whether the module drops anything in training: what `drop_nothing` would set to 0."""
    return any(
        (isinstance(child, Dropout) and child.p > 0)
        or any(_is_rate(name, value) for name, value in vars(child).items())
        for child in module.modules()
    )


def _is_rate(name: str, value: Any) -> bool:
    return isinstance(value, float) and "drop" in name.lower() and value > 0
