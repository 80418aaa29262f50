"""What one device reaches: rate of large products, seconds of the optimizer, memory before use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..profile.trace import compute_dtype
from .agree import usual_s

if TYPE_CHECKING:
    from ..runtime.mesh import World

HOST_SIDES = (256, 512, 1024)
DEVICE_SIDES = (2048, 4096, 8192)
ENOUGH_S = 0.1
HOST_PARAMETERS = 2**20
DEVICE_PARAMETERS = 2**26


def matmul_flops(world: World, precision: str) -> float:
    """Best rate of square products at a precision, two flops a multiply-add."""
    import torch

    best = 0.0
    for side in HOST_SIDES if world.accelerator.on_host else DEVICE_SIDES:
        left = torch.randn(side, side, device=world.device).to(compute_dtype(precision))
        seconds = usual_s(world, lambda left=left: left @ left, repeats=3)  # type: ignore[misc]
        best = max(best, 2.0 * side**3 / seconds)
        if seconds > ENOUGH_S:
            break
    return best


def optimizer_s_per_byte(world: World) -> float:
    """Seconds of AdamW (fused) for each byte of float32 master parameters.

    Rules with less state take less; the difference is left aside.
    """
    import torch

    count = HOST_PARAMETERS if world.accelerator.on_host else DEVICE_PARAMETERS
    weights = torch.zeros(count, device=world.device, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)

    def step() -> None:
        optimizer.step()

    return usual_s(world, step) / (4 * count)
