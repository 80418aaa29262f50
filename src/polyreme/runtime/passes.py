"""Forward and backward passes of a step over its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..graph.loss import cross_entropy
from .apply.data import Applied


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Samples on this process's device, and their labels.

    `n_samples` 0 marks a filler: samples whose labels carry no loss, run only so that this rank
    takes part in the collectives of its layers.
    """

    fields: Mapping[str, torch.Tensor]
    labels: torch.Tensor
    n_samples: int


def accumulate(
    applied: Applied,
    microbatches: Sequence[Microbatch],
    nominal_weight: float,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the summed loss over `nominal_weight`; that loss, and labels that carry it."""
    applied.buckets.begin()
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    weight = torch.zeros((), dtype=torch.float64, device=device)
    for index, microbatch in enumerate(microbatches):
        applied.begin_microbatch(last=index == len(microbatches) - 1)
        with buffers_kept(applied, fillers_only=True) as restore:
            logits = applied.stage(microbatch.fields)
            total, count = cross_entropy(logits, microbatch.labels)
            (total / nominal_weight).backward()  # type: ignore[no-untyped-call]
            if not microbatch.n_samples:
                restore()
        loss_sum += total.detach()
        weight += count
    applied.buckets.finish()
    return loss_sum, weight


@contextmanager
def buffers_kept(applied: Applied, *, fillers_only: bool = False) -> Iterator[Callable[[], object]]:
    """Gives a function that puts the weights' buffers back as they are now."""
    live = [slot.tensor for slot in applied.buffers]
    if not live or (fillers_only and not applied.units):
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
