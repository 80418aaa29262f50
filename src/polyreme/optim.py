"""Every rule as a torch optimizer: ``pr.optim.SNGM(params, lr=0.1, momentum=0.9)``.

Options are the fields of the rule, and each parameter group may have values of its own; norms are
over all groups together, and over the devices among which parameters are sharded (DTensors, as
FSDP2 makes them). torch's schedulers, closures and state_dict work as with its own optimizers.
State has the type of its parameter, counts are float32. Gradients that are NaN or infinite are not
looked for: skip the step (torch.amp's GradScaler does).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, ClassVar, get_args

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .algo.legal import made
from .algo.optimizer import RuleOptimizer
from .algo.rule import Rule
from .algo.rule.kind import RuleKind
from .errors import ConfigError, Violation, absent


class OwnOptimizer(RuleOptimizer):
    """A rule of a name of its own; each group plays the rule with its own options.

    Raises:
        TypeError: An option is unknown.
        ConfigError: A value is not legal, or a parameter is complex or has a sparse gradient.
    """

    kind: ClassVar[type[RuleKind]]

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | None = None,
        **options: Any,
    ) -> None:
        if lr is not None:
            options["lr"] = lr
        rule = made(self.kind, options, type(self).__name__)
        self._options = msgspec.structs.asdict(rule)
        super().__init__(params, rule)
        self.defaults.update(self._options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """A group whose options are its own, or else the optimizer's."""
        name = type(self).__name__
        own = {key: value for key, value in param_group.items() if key not in _GROUP}
        rates = {key: float(own[key]) for key in ("lr",) if key in own}
        made(self.kind, {**self._options, **own, **rates}, f"{name} parameter group")
        for key, value in self._options.items():
            param_group.setdefault(key, value)
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                rule = "is complex, and rules are for real numbers"
                raise _refused(name, str(parameter.dtype), rule, "torch.view_as_real of it")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of the rule on the gradients that the parameters hold."""
        self._sum_over_shards()
        self._rules = {
            parameter: self._rule(group)
            for group in self.param_groups
            for parameter in group["params"]
        }
        return super().step(closure)

    def _sum_over_shards(self) -> None:
        """Take the sums of rules over all devices that hold parts of the parameters."""
        spread = {
            (parameter.device_mesh, tuple(place.is_shard() for place in parameter.placements))
            for group in self.param_groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor)
        }
        spread = {(mesh, sharded) for mesh, sharded in spread if any(sharded)}
        if not spread:
            return
        if len(spread) > 1:
            rule = "are sharded in more than one way, and the rule sums over all of them"
            legal = "one mesh and one way to shard, or an optimizer for each"
            raise _refused(type(self).__name__, len(spread), rule, legal)
        ((mesh, sharded),) = spread
        dims = [dim for dim, split in enumerate(sharded) if split]

        def over_devices(partial: torch.Tensor) -> torch.Tensor:
            moved = partial.to(mesh.device_type)
            for dim in dims:
                dist.all_reduce(moved, group=mesh.get_group(dim))
            return moved.to(partial.device)

        self.over_devices = over_devices
        self.counts_whole = all(mesh.get_local_rank(dim) == 0 for dim in dims)

    def _rule(self, group: dict[str, Any]) -> RuleKind:
        options = {key: group[key] for key in self._options}
        return self.kind(**{**options, "lr": float(group["lr"])})

    def _program(self, parameters: Sequence[torch.Tensor], lr: float) -> Generator[Any, Any, Any]:
        for parameter in parameters:
            assert parameter.grad is not None
            if parameter.grad.is_sparse:
                name, rule = type(self).__name__, "is sparse, and rules are for whole gradients"
                raise _refused(name, "gradient", rule, "an embedding without sparse=True")
        # A program asks its rule before its first yield, and `together` starts one after another.
        self.rule = self._rules[parameters[0]]
        return (yield from super()._program(parameters, float(lr)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As pickled, or as a state_dict says; options that it lacks are the optimizer's."""
        super().__setstate__(state)
        self._options = {key: self.defaults[key] for key in self.kind.__struct_fields__}
        self.rule, self.over_devices = self.kind(**self._options), None
        for group in self.param_groups:
            for key, value in self._options.items():
                group.setdefault(key, value)


_GROUP = ("params", "param_names", "initial_lr")


def _refused(name: str, value: object, rule: str, legal: str) -> ConfigError:
    path = f"{name}.params"
    return ConfigError([Violation(path=path, value=value, rule=rule, legal=legal)])


def _of(kind: type[RuleKind]) -> type[OwnOptimizer]:
    fields = {"kind": kind, "__doc__": kind.__doc__, "__module__": __name__}
    return type(kind.__name__, (OwnOptimizer,), fields)


_OPTIMIZERS = {kind.__name__: _of(kind) for kind in get_args(Rule)}
__all__ = sorted(_OPTIMIZERS)


def __getattr__(name: str) -> type[OwnOptimizer]:
    try:
        return _OPTIMIZERS[name]
    except KeyError:
        raise absent(__name__, name, __all__) from None


def __dir__() -> list[str]:
    return __all__
