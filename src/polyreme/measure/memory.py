"""Bytes of passes as the allocator of the device counts them, on accelerators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..profile.record import KeptBytes, LayerTimes, PassingBytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ..cluster.accelerator import Accelerator
    from ..runtime.compiled import Score


@dataclass(frozen=True, kw_only=True)
class PassBytes:
    """Of a microbatch of so many samples: kept beside inputs, and more than that at the peak."""

    microbatch: int
    kept: int
    passing: int


def pass_bytes(
    module: nn.Module, arguments: Sequence[torch.Tensor], accelerator: Accelerator
) -> tuple[int, int]:
    """What a pass keeps beside its inputs, and what it holds beside both at its peak.

    Outputs are dropped when the next layer would have read them, their gradients come with the
    backward pass, and those of weights must be dropped by hooks of the weights.
    """
    import torch

    before = accelerator.allocated_bytes()
    accelerator.reset_peak()
    out = module(*arguments)
    outputs = list(out) if isinstance(out, tuple) else [out]
    ends = [_end(output) for output in outputs if output.requires_grad]
    most = accelerator.peak_bytes()
    del out, outputs
    kept = accelerator.allocated_bytes() - before
    if ends:
        accelerator.reset_peak()
        torch.autograd.backward(ends)
        most = max(most, accelerator.peak_bytes())
    kept = max(0, kept)
    return kept, max(0, most - before - kept)


def loss_bytes(logits: torch.Tensor, accelerator: Accelerator, score: Score) -> int:
    """At the peak of the loss of such logits and its gradient, the logits among them."""
    import torch

    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    logits.requires_grad_()
    before = accelerator.allocated_bytes()
    accelerator.reset_peak()
    read = logits.clone()
    total = score(read, labels)[0]
    del read
    total.backward()  # type: ignore[no-untyped-call]
    return max(0, accelerator.peak_bytes() - before)


def with_bytes(times: LayerTimes, found: Sequence[PassBytes], loss: int | None) -> LayerTimes:
    """What is kept beside inputs as it was measured, in place of what was counted before.

    Kernels of a device keep other things than those of the host, and compilers choose. Bytes of
    several tensor parts stay as they were counted.
    """
    if not found:
        return times
    again = times.again_bytes_per_sample or 0
    sample, fixed = _line([(each.microbatch, each.kept) for each in found])
    more, beside = sample - again, fixed - times.fixed_bytes.again
    still = KeptBytes(
        saved=max(0, times.fixed_bytes.saved + beside),
        recompute=times.fixed_bytes.recompute,
        again=max(0, times.fixed_bytes.again + beside),
    )
    passing, at_once = _line([(each.microbatch, each.passing) for each in found])
    return msgspec.structs.replace(
        times,
        saved_bytes_per_sample=max(0, times.saved_bytes_per_sample + more),
        again_bytes_per_sample=again + more,
        fixed_bytes=still,
        alone_bytes=KeptBytes(recompute=times.alone_bytes.recompute),
        passing_bytes=PassingBytes(sample=passing, fixed=at_once),
        loss_bytes=loss,
    )


def _line(points: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Bytes of a sample and of any microbatch, by the two largest; never less than at these.

    >>> _line([(1, 9), (2, 14), (4, 22)]), _line([(2, 6)]), _line([(1, 1), (2, 4)])
    ((4, 6), (3, 0), (2, 0))
    """
    size, n_bytes = points[-1]
    if len(points) > 1:
        smaller, fewer = points[-2]
        slope = max(0, -(-(n_bytes - fewer) // (size - smaller)))
        fixed = max(n_bytes - slope * size, fewer - slope * smaller)
        if fixed >= 0:
            return slope, fixed
    return -(-n_bytes // size), 0


def drop_gradient(weight: torch.Tensor) -> None:
    """A hook: gradients of weights are taken away as soon as they are there."""
    weight.grad = None


def _end(output: torch.Tensor) -> torch.Tensor:
    """What stands for all that comes after a layer: reads its output, and gives its gradient."""
    apply: Callable[[torch.Tensor], torch.Tensor] = _ending().apply
    return apply(output)


def _ending() -> Any:
    import torch

    class Ending(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            ctx.shape, ctx.dtype = output.shape, output.dtype
            return output.new_zeros(())

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.new_zeros(ctx.shape, dtype=ctx.dtype)

    return Ending
