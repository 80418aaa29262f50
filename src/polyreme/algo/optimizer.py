"""Any rule as a torch optimizer, for loops of one's own and for sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from .effects import together
from .rule.kind import RuleKind
from .vector import Layout


class RuleOptimizer(torch.optim.Optimizer):
    """Plays a rule tensor by tensor, in step; norms over all of them are exact.

    `over_devices` sums a small tensor over the devices that hold parts of these parameters (unset:
    none but this one does); a DTensor is taken by its local part. A parameter without gradient
    stays as it is, and so does its state.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        rule: RuleKind,
        *,
        over_devices: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.rule = rule
        self.over_devices = over_devices
        super().__init__(params, {"lr": rule.lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the rule on the gradients that the parameters hold."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [
            (parameter, group["lr"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        programs = [self._program(parameter, lr) for parameter, lr in moved]
        done = together(programs, self.over_devices or (lambda partial: partial))
        for (parameter, _), (delta, state) in zip(moved, done, strict=True):
            _local(parameter).add_(delta.view_as(_local(parameter)))
            self._keep(parameter, state)
        return loss

    def _program(self, parameter: torch.Tensor, lr: float) -> Generator[Any, Any, Any]:
        local = _local(parameter)
        assert parameter.grad is not None
        flat = local.reshape(-1)
        layout = Layout.of({"": tuple(flat.shape)})
        state = self.state[parameter] or self.rule.init(flat)
        given = {k: _local(v).reshape(-1) if torch.is_tensor(v) else v for k, v in state.items()}
        gradient = _local(parameter.grad).reshape(-1)
        result = self.rule.update(gradient, given, flat, lr=lr, layout=layout)
        if isinstance(result, Generator):
            return (yield from result)
        return result

    def _keep(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        held = self.state[parameter]
        for key, value in state.items():
            if not torch.is_tensor(value):
                held[key] = value
            elif key in held:
                _local(held[key]).copy_(value.view_as(_local(held[key])))
            else:
                held[key] = torch.zeros_like(parameter)
                _local(held[key]).copy_(value.view_as(_local(held[key])))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This device's part of a tensor that is sharded (a DTensor); any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor.detach() if to_local is None else to_local()
    return local
