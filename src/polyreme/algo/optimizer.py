"""Any rule as a torch optimizer, for loops of one's own and for sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from ..errors import ConfigError, Violation
from .effects import Split, SumShards, settled, together
from .rule.kind import RuleKind
from .vector import Layout

_ENTRIES = 1 << 21  # that small tensors may have together: more would only take memory


class RuleOptimizer(torch.optim.Optimizer):
    """Plays a rule tensor by tensor, small ones as one vector; norms over all of them are exact.

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
        self._places: dict[torch.Tensor, int] = {}
        super().__init__(params, {"lr": rule.lr})

    @torch.no_grad()
    def begin(self) -> None:
        """Make the state of all parameters as it is before the first step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._keep([parameter], self.rule.init(_local(parameter).reshape(-1)))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the rule on the gradients that the parameters hold."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = (parameter for group in self.param_groups for parameter in group["params"])
        self._places = {parameter: place for place, parameter in enumerate(every)}
        programs = [
            self._program(parameters, group["lr"])
            for group in self.param_groups
            for parameters in self._vectors(group["params"])
        ]
        if not programs and self.over_stages is not None:
            programs = [self._nothing()]
        together(programs, self.over_devices or (lambda partial: partial), self.over_stages)
        return loss

    def _vectors(self, parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Parameters with gradients, those together that are updated as one vector."""
        filling: dict[Any, list[torch.Tensor]] = {}
        room: dict[Any, int] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            held = self.state[parameter]
            at = tuple(int(held[key]) for key in self.rule.counts) if held else None
            kind = parameter.dtype, parameter.grad.dtype, parameter.device, type(parameter)
            key = *kind, self._enters(parameter, per_tensor=False), bool(held), at
            if key in filling and room[key] < parameter.numel():
                yield filling.pop(key)
            if key not in filling:
                filling[key], room[key] = [], _ENTRIES
            filling[key].append(parameter)
            room[key] -= parameter.numel()
        yield from filling.values()

    def _program(self, parameters: Sequence[torch.Tensor], lr: float) -> Generator[Any, Any, Any]:
        """The step of a vector, done at its end: so no two hold their new state at once.

        But for those that must wait for a sum.
        """
        if self.rule.ties and any(map(_is_part, parameters)):
            raise _cut(self.rule)
        local = [_local(parameter) for parameter in parameters]
        flat = _joined(local)
        layout = _layout(tuple(each.numel() for each in local))
        state = self._held(parameters) or self.rule.init(flat)
        gradient = _joined([_local(_gradient(parameter)) for parameter in parameters])
        update = settled(self.rule.update(gradient, state, flat, lr=lr, layout=layout))
        delta, state = yield from self._summed(update, parameters)
        torch._foreach_add_(local, _parts(delta, local))
        self._keep(parameters, state)

    def _nothing(self) -> Split[Any]:
        """What is played here where others of the model have gradients."""
        empty = torch.zeros(0, device=self.device)
        layout = _layout((0,))
        state = self.rule.init(empty)
        return settled(self.rule.update(empty, state, empty, lr=self.defaults["lr"], layout=layout))

    def _summed(self, program: Split[Any], parameters: Sequence[torch.Tensor]) -> Split[Any]:
        """The program, with what it asks for answered here where no other part has a share.

        What is of each tensor is asked for in its place among all: devices differ in what they
        join.
        """
        answer: Any = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value
            if asked.per_tensor and self.over_devices is None:
                answer = asked.partial
            elif asked.per_tensor:
                device = asked.partial.device
                at = torch.tensor([self._places[each] for each in parameters], device=device)
                enters = [self._enters(each, per_tensor=True) for each in parameters]
                own = torch.where(torch.tensor(enters, device=device), asked.partial, 0.0)
                placed = own.new_zeros(*own.shape[:-1], len(self._places)).index_copy(-1, at, own)
                answer = (yield SumShards(partial=placed, per_tensor=True))[..., at]
            elif self._enters(parameters[0], per_tensor=False):
                answer = yield asked
            else:
                answer = yield SumShards(partial=torch.zeros_like(asked.partial))

    def _enters(self, parameter: torch.Tensor, *, per_tensor: bool) -> bool:
        """Whether what is here of it enters sums."""
        if self.counts is None:
            return self.counts_whole or _is_part(parameter)
        return self.counts(parameter, per_tensor)

    def _held(self, parameters: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state as the rule takes it; counts are those of all."""
        counts, each = self.rule.counts, [self.state[parameter] for parameter in parameters]
        return {
            key: int(value) if key in counts else _joined([_local(own[key]) for own in each])
            for key, value in each[0].items()
        }

    def _keep(self, parameters: Sequence[torch.Tensor], state: dict[str, Any]) -> None:
        for key, value in state.items():
            if torch.is_tensor(value):
                for parameter in parameters:
                    if key not in self.state[parameter]:
                        self.state[parameter][key] = torch.zeros_like(
                            parameter, requires_grad=False
                        )
                own = [_local(self.state[parameter][key]) for parameter in parameters]
                torch._foreach_copy_(own, _parts(value, own))
                continue
            for parameter in parameters:
                if key not in self.state[parameter]:
                    # On the host, where it is needed: reading it waits for no device.
                    self.state[parameter][key] = torch.zeros((), dtype=torch.float32)
                self.state[parameter][key].fill_(value)


def _cut(rule: RuleKind) -> ConfigError:
    why = f"ties entries of a tensor ({type(rule).__name__}), and parts of it are on other devices"
    legal = "parameters that are not sharded"
    return ConfigError([Violation(path="params", value="DTensor", rule=why, legal=legal)])


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether this device holds a part of a tensor alone (a DTensor that is sharded)."""
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))


@lru_cache(maxsize=1024)
def _layout(sizes: tuple[int, ...]) -> Layout:
    """Of tensors of so many entries; what follows from it is found once."""
    return Layout.of({str(n): (size,) for n, size in enumerate(sizes)})


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None, "only those with gradients are asked for it"
    return parameter.grad


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """As one vector; that of one is its own memory, where that is in a row."""
    flat = [each.reshape(-1) for each in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _parts(vector: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of a vector, in the shapes of those it was joined of."""
    parts = torch.split(vector, [each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this device holds of a DTensor; any other as it is."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor.detach() if to_local is None else to_local()
    return local
