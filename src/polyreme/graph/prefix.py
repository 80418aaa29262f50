"""Tokens of a sequence in slices: what attention keeps of those before, and its gradients.

Source: Li et al. 2021 (TeraPipe), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Kept:
    """Of one slice: what the layer made, and what later slices read in its place."""

    made: tuple[torch.Tensor, torch.Tensor]
    read: tuple[torch.Tensor, torch.Tensor]


class Prefix:
    """Keys and values [B, heads, T, head] of one stage's layers for one microbatch, slice by slice.

    It stands for the library's cache. Slices go forward in order and backward the last one first.
    `start` is how many tokens come before the slice at hand.
    """

    def __init__(self) -> None:
        self.start = 0
        self._kept: dict[int, list[_Kept]] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep this slice's; all up to here."""
        import torch

        before = self._kept.setdefault(layer, [])
        grad = torch.is_grad_enabled()
        read = (keys.detach().requires_grad_(grad), values.detach().requires_grad_(grad))
        whole_keys = torch.cat([*(each.read[0] for each in before), keys], 2)
        whole_values = torch.cat([*(each.read[1] for each in before), values], 2)
        before.append(_Kept((keys, values), read))
        return whole_keys, whole_values

    def pop(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What the last slice made that later ones read, and their gradients; it is dropped."""
        made, gradients = [], []
        for slices in self._kept.values():
            last = slices.pop()
            for own, read in zip(last.made, last.read, strict=True):
                if read.grad is not None:
                    made.append(own)
                    gradients.append(read.grad)
        return made, gradients


def argument(parameters: Mapping[str, Any]) -> str:
    """The name of the library's argument that takes a cache."""
    return "cache" if "cache" in parameters else "past_key_values"
