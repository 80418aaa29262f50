"""Microbatches of a step, and what must be as it was before one: buffers, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .applied import Applied


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Samples on this process's device, and their labels.

    `n_samples` 0 marks a filler: samples whose labels carry no loss, run only so that this rank
    takes part in the collectives of its layers. `n_rows` is how many rows they
    have, also where no layer here reads one and `fields` and `labels` are empty.
    """

    fields: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    n_samples: int
    n_rows: int


@contextmanager
def buffers_kept(applied: Applied, *, fillers_only: bool = False) -> Iterator[Callable[[], object]]:
    """Gives a function that puts the weights' buffers back as they are now."""
    live = [slot.tensor for slot in applied.buffers]
    if not live or (fillers_only and not applied.fills):
        yield lambda: None
        return
    kept = [tensor.clone() for tensor in live]
    yield lambda: [tensor.copy_(old) for tensor, old in zip(live, kept, strict=True)]


def set_seed(device: torch.device, seed: int) -> None:
    """Seed the host and this device alone; torch.manual_seed costs a millisecond a step."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def seed_of(seed: int, step: int, rank: int) -> int:
    """A seed for a step's random numbers on one rank: a run that resumes draws the same."""
    return (seed * 1_000_003 + step) * 65_537 + rank & (2**63 - 1)
