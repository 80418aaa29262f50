"""Pure functions of tensors in few kernels: compiled, where tensors lie on an accelerator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from types import FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_FORMS = 64  # of one function: types, numbers of dimensions, sizes of 0 and 1


def applies(x: torch.Tensor) -> bool:
    """Whether functions of such a tensor are worth a kernel of their own; never on the host."""
    return x.device.type != "cpu" and x.numel() > 0


def fused(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function with these options, compiled once for tensors of any size.

    What else it is given are tensors, and integers that may change from call to call; options are
    constants. Where torch cannot compile it, it runs as it is, with a warning.
    """
    return _fused(function, tuple(sorted(options.items())))


class _Fused:
    """A function that is compiled until that fails."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        import torch
        import torch._dynamo

        settings = torch._dynamo.config
        settings.recompile_limit = max(settings.recompile_limit, _FORMS)
        self._plain = plain
        # Without Triton there are no kernels to be had but torch's own.
        self._run = torch.compile(plain, dynamic=True) if find_spec("triton") else plain

    def __call__(self, *given: Any) -> Any:
        import torch._dynamo

        try:
            return self._run(*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._run is self._plain:
                raise
            name = self._plain.__name__
            warnings.warn(f"{name} runs uncompiled: {error}", RuntimeWarning, stacklevel=2)
            self._run = self._plain
            return self._run(*given)


@cache
def _fused(function: FunctionType, options: tuple[tuple[str, Any], ...]) -> _Fused:
    # Torch takes for constants what it finds as defaults of an inner function, and keeps what it
    # compiled by the code of the outer one, so each has its own.
    inner = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    inner.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict(options)}

    def outer(*given: Any) -> Any:
        return inner(*given)

    code = outer.__code__.replace(co_name=function.__name__)
    return _Fused(FunctionType(code, outer.__globals__, function.__name__, None, outer.__closure__))
