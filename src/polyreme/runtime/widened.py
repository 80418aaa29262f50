"""Float64 throughout: what libraries round to float32 on the way is not rounded.

Norms and softmax of the library compute in float32 whatever the model's type. Two ways to the same
sums then differ by roundings of float32, which hides what a proof in float64 is to find.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Widened(TorchFunctionMode):
    """Casts to float32 in here leave float64 tensors that gradients go through as they are.

    Tables of constants (positions) are rounded as the library rounds them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and _is_wide(args[0]):
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to or "dtype" in kwargs:
                args = tuple(_wide(each) for each in args)
                kwargs = {name: _wide(each) for name, each in kwargs.items()}
        return func(*args, **kwargs)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float64 and value.requires_grad


def _wide(argument: Any) -> Any:
    if argument is torch.float32:
        return torch.float64
    return argument
