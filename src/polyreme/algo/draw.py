"""Random numbers of an algorithm: a function of seed, worker, step and what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from . import counted, fused

if TYPE_CHECKING:
    import torch

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Where random numbers come from: nothing is carried from step to step.

    `own` are this worker's numbers, `shared` the same on all workers, `at` tells one use of a
    step (a tensor, a round) from another. The host draws them one after another; an accelerator
    has others, by their place (`counted`), the same on any kind of it.
    """

    seed: int
    worker: int
    step: int
    use: int = 0

    def at(self, use: int) -> Draw:
        """Numbers for another use in the same step."""
        mixed = mix(self.use, use + 1)
        return Draw(seed=self.seed, worker=self.worker, step=self.step, use=mixed)

    def own(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator that only this worker has."""
        return self._generator(self.worker + 1, device)

    def shared(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A generator that all workers have."""
        return self._generator(0, device)

    def uniform(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers of this worker in [0, 1), one for each entry, in float32 or as wide as these."""
        import torch

        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if fused.applies(like):
            drawn = fused.fused(counted.uniform, dtype=dtype)
            found: torch.Tensor = drawn(self.key("own", like.device), like.numel())
            return found.view(like.shape)
        return torch.rand(like.shape, dtype=dtype, generator=self.own()).to(like.device)

    def seed_of(self, who: Literal["own", "shared"], device: torch.device) -> torch.Tensor:
        """An int64 tensor of one number, from which a packet's receiver draws what was drawn.

        An accelerator's is a key, which tells a receiver on any device how it was drawn from.
        """
        import torch

        if device.type != "cpu":
            return self.key(who, device)
        generator = self.shared() if who == "shared" else self.own()
        return torch.randint(1 << 62, (1,), generator=generator)

    def key(self, who: Literal["own", "shared"], device: torch.device) -> torch.Tensor:
        """An int64 tensor of one number, from which numbers are told by their place."""
        import torch

        mixed = self._mixed(0 if who == "shared" else self.worker + 1)
        number = mixed >> 2 | counted.COUNTED
        return torch.full((1,), number, dtype=torch.int64, device=device)

    def _mixed(self, who: int) -> int:
        mixed = 0
        for number in (self.seed, who, self.step, self.use):
            mixed = mix(mixed, number)
        return mixed

    def _generator(self, who: int, device: torch.device | str) -> torch.Generator:
        import torch

        generator = torch.Generator(device)
        generator.manual_seed(self._mixed(who) >> 1)
        return generator


def of_seed(seed: torch.Tensor) -> torch.Generator:
    """A generator that starts from such a number."""
    import torch

    return torch.Generator().manual_seed(int(seed))


def is_key(seed: torch.Tensor) -> bool:
    """Whether numbers are told from it by their place, as an accelerator draws them.

    Waits for the device: a host's seed may have come to it.
    """
    return int(seed) >= counted.COUNTED


def mix(state: int, number: int) -> int:
    """SplitMix64's finaliser over the state plus a number. Source: Steele et al. 2014."""
    mixed = (state * 0x9E3779B97F4A7C15 + number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
