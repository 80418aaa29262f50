"""What one device reaches: rate of large products, seconds of the update and of gradients' sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..plan.ir import BUCKET_BYTES
from ..profile.trace import compute_dtype
from .agree import usual_s
from .memory import drop_gradient
from .passes import ran_once

if TYPE_CHECKING:
    from ..runtime.mesh import World
    from .passes import HeadStart, Ran

HOST_SIDES = (256, 512, 1024)
DEVICE_SIDES = (2048, 4096, 8192)
ENOUGH_S = 0.1
HOST_PARAMETERS = 2**20
DEVICE_PARAMETERS = 2**26
_GRADIENTS = 64


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


def optimizer_s_per_byte(world: World, precision: str) -> float:
    """Seconds of an update for each byte of float32 master parameters.

    The norm of gradients, AdamW (fused), and the copy that layers compute with, where they have
    one. Rules with less state take less; the difference is left aside.
    """
    import torch

    count, dtype = _parameters(world), compute_dtype(precision)
    weights = torch.zeros(count, device=world.device, requires_grad=True)
    gradient = torch.ones_like(weights)
    weights.grad = gradient
    optimizer = torch.optim.AdamW([weights], fused=True)

    copies = weights.detach().to(dtype) if dtype.itemsize < weights.itemsize else None

    def step() -> None:
        torch._foreach_norm([gradient])
        optimizer.step()
        if copies is not None:
            torch._foreach_copy_([copies], [weights.detach()])

    return usual_s(world, step) / (4 * count)


def gradients_s_per_byte(world: World, precision: str) -> tuple[float, float]:
    """Seconds in which gradients of a microbatch come into the sums of a step, by their bytes.

    Of the first microbatch, and of each that is added to it. A lone process whose layers compute
    in the master's dtype takes the first as it comes.
    """
    import torch

    count, dtype = _parameters(world), compute_dtype(precision)
    came = torch.ones(count, dtype=dtype, device=world.device)
    sums = torch.zeros(count, dtype=torch.promote_types(dtype, torch.float32), device=world.device)

    def first() -> None:
        sums.copy_(came)

    def more() -> None:
        sums.add_(came)

    taken = world.group is None and came.dtype == sums.dtype
    first_s = 0.0 if taken else usual_s(world, first)
    return first_s / sums.nbytes, usual_s(world, more) / sums.nbytes


def gradient_host_s(world: World, precision: str, head: HeadStart) -> float:
    """Seconds in which a host takes one gradient to the sums of a step, hooks' own aside."""
    import torch

    from ..runtime.bucket import Replicated
    from ..runtime.buckets import Buckets
    from ..runtime.timing import Traffic

    def backward_s(*, sums: bool) -> float:
        masters = [
            torch.nn.Parameter(torch.zeros(8, device=world.device)) for _ in range(_GRADIENTS)
        ]
        dtype = compute_dtype(precision)
        weights = [
            each if dtype == each.dtype else torch.nn.Parameter(each.to(dtype)) for each in masters
        ]
        members = [
            Replicated(name=str(n), master=master, working=weight)
            for n, (master, weight) in enumerate(zip(masters, weights, strict=True))
        ]
        buckets = Buckets(
            members if sums else (),
            bucket_bytes=BUCKET_BYTES,
            overlap=False,
            group=None,
            traffic=Traffic(),
        )
        for weight in weights if not sums else ():
            hook: Any = drop_gradient
            weight.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

        def back(outputs: list[torch.Tensor]) -> None:
            torch.autograd.backward(outputs, outputs)
            buckets.passed(())

        def play() -> Ran:
            return ran_once(world, lambda: [each.clone() for each in weights], back)

        return head.host_s(world, play)[1]

    return max(0.0, backward_s(sums=True) - backward_s(sums=False)) / _GRADIENTS


def _parameters(world: World) -> int:
    return HOST_PARAMETERS if world.accelerator.on_host else DEVICE_PARAMETERS
