"""Any rule as a torch optimizer, for loops of one's own and for sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch

from ..errors import ConfigError, Violation
from .effects import Split, SumShards, settled, together
from .rule.kind import RuleKind
from .vector import Layout


class RuleOptimizer(torch.optim.Optimizer):
    """Plays a rule tensor by tensor, in step; norms over all of them are exact.

    `over_devices` sums a small tensor over the devices that hold parts of these parameters (unset:
    none but this one does); a DTensor is taken by its local part. Where others hold parts, a tensor
    that is no DTensor is whole on all of them: it enters the sums of one, and that this is the one
    is what `counts_whole` says. All devices have gradients of the same parameters.

    Where other devices hold other parameters of the model, `over_stages` sums over all of them
    what is of all parameters; then one without gradients takes part in these with an empty tensor,
    of this `device`. `counts` may say of each parameter whether what is here enters sums of one
    tensor (true), or of all (false).

    A parameter without gradient stays as it is, and so does its state: vectors like the parameter,
    and counts as float32 tensors without dimensions.
    """

    over_devices: Callable[[torch.Tensor], torch.Tensor] | None = None
    over_stages: Callable[[torch.Tensor], torch.Tensor] | None = None
    counts_whole: bool = True
    counts: Callable[[torch.Tensor, bool], bool] | None = None
    device: torch.device | None = None

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        rule: RuleKind,
        *,
        over_devices: Callable[[torch.Tensor], torch.Tensor] | None = None,
        over_stages: Callable[[torch.Tensor], torch.Tensor] | None = None,
        counts_whole: bool = True,
        counts: Callable[[torch.Tensor, bool], bool] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rule = rule
        self.over_devices = over_devices
        self.over_stages = over_stages
        self.counts_whole = counts_whole
        self.counts = counts
        self.device = device
        super().__init__(params, {"lr": rule.lr})

    @torch.no_grad()
    def begin(self) -> None:
        """Make the state of all parameters as it is before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._keep(parameter, self.rule.init(_local(parameter).reshape(-1)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the rule on the gradients that the parameters hold."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        programs = [
            self._program(parameter, group["lr"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not programs and self.over_stages is not None:
            programs = [self._nothing()]
        together(programs, self.over_devices or (lambda partial: partial), self.over_stages)
        return loss

    def _program(self, parameter: torch.Tensor, lr: float) -> Generator[Any, Any, Any]:
        """The step of one tensor, done at its end: so no two hold their new state at once.

        But for those that must wait for a sum.
        """
        local = _local(parameter)
        if self.rule.ties and _is_part(parameter):
            raise _cut(self.rule)
        assert parameter.grad is not None
        flat = local.reshape(-1)
        layout = Layout.of({"": tuple(flat.shape)})
        state = self._held(parameter) or self.rule.init(flat)
        gradient = _local(parameter.grad).reshape(-1)
        update = settled(self.rule.update(gradient, state, flat, lr=lr, layout=layout))
        delta, state = yield from self._summed(update, parameter)
        local.add_(delta.view_as(local))
        self._keep(parameter, state)

    def _nothing(self) -> Split[Any]:
        """What is played here where others of the model have gradients."""
        empty = torch.zeros(0, device=self.device)
        layout = Layout.of({"": (0,)})
        state = self.rule.init(empty)
        return settled(self.rule.update(empty, state, empty, lr=self.defaults["lr"], layout=layout))

    def _summed(self, program: Split[Any], parameter: torch.Tensor) -> Split[Any]:
        """The program, with what it asks for answered here where no other part has a share."""
        alone = self.over_devices is None
        whole = self.counts_whole or _is_part(parameter)
        answer: Any = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value
            if asked.per_tensor and alone:
                answer = asked.partial
            elif whole if self.counts is None else self.counts(parameter, asked.per_tensor):
                answer = yield asked
            else:
                nothing = torch.zeros_like(asked.partial)
                answer = yield SumShards(partial=nothing, per_tensor=asked.per_tensor)

    def _held(self, parameter: torch.Tensor) -> dict[str, Any]:
        """The state as the rule takes it."""
        counts = self.rule.counts
        return {
            key: int(value) if key in counts else _local(value).reshape(-1)
            for key, value in self.state[parameter].items()
        }

    def _keep(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        held = self.state[parameter]
        for key, value in state.items():
            if not torch.is_tensor(value):
                # On the host, where it is needed: reading it waits for no device.
                held.setdefault(key, torch.zeros((), dtype=torch.float32)).fill_(value)
                continue
            if key not in held:
                held[key] = torch.zeros_like(parameter, requires_grad=False)
            _local(held[key]).copy_(value.view_as(_local(held[key])))


def _cut(rule: RuleKind) -> ConfigError:
    why = f"ties entries of a tensor ({type(rule).__name__}), and parts of it are on other devices"
    legal = "parameters that are not sharded"
    return ConfigError([Violation(path="params", value="DTensor", rule=why, legal=legal)])


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether this device holds a part of a tensor alone (a DTensor that is sharded)."""
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this device holds of a DTensor; any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor.detach() if to_local is None else to_local()
    return local
