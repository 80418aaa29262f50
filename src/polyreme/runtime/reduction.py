"""How FSDP2 reduces gradients of sharded parameters: by sum, of used and unused ones alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from .applied import Sharded


def watch(parameter: Sharded) -> Callable[[], None]:
    """Notes in each backward pass that the gathered parameter got a gradient.

    Weakly held, as hooks of tensors are out of the sight of the collector of cycles.
    """
    noted: Any = weakref.proxy(parameter)

    def note(_: torch.Tensor) -> None:
        noted.used = True

    def start() -> None:
        whole: Any = parameter.slot.tensor
        whole.register_post_accumulate_grad_hook(note)

    return start


def sum_gradients(module: FSDPModule) -> None:
    """Reduce by sum, as all else here, and not by mean."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def reduce_unused(module: Any) -> None:
    """Let parameters without a gradient contribute zeros, so that all ranks reduce the same.

    torch before 2.13 has no switch for it; there gradients are filled in before it looks.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    group = module._get_fsdp_state()._fsdp_param_group
    reduce = group.post_backward

    def fill_and_reduce(*args: Any) -> Any:
        for part in group.fsdp_params if group.reduce_grads else ():
            whole = getattr(part, "_unsharded_param", None)
            if whole is None or not whole.requires_grad or whole.grad is not None:
                continue
            if part.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        return reduce(*args)

    group.post_backward = fill_and_reduce
