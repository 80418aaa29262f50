"""What a hook keeps on each worker, and what it does with a bucket."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..algo import exchange
from ..algo.compose import DataParallel
from ..algo.compress.dense import Dense
from ..algo.draw import Draw
from ..algo.feedback.kind import Turn
from ..algo.feedback.none import NoFeedback
from ..algo.topology.all_reduce import AllReduce
from ..algo.vector import Layout
from ..algo.worker import Worker
from ..errors import ConfigError, Violation
from .carrier import Carrier

State = dict[str, Any]
Numbers = tuple[int, ...]
"""Of a bucket's parameters, as their gradients first came."""


@dataclass(frozen=True, kw_only=True)
class _Draw(Draw):
    """Tells uses apart by a parameter's number, whatever bucket it is in."""

    numbers: Numbers

    def at(self, use: int) -> Draw:
        """Numbers for a parameter; beyond them, for the bucket."""
        if self.use or use >= len(self.numbers):
            return super().at(use if self.use else -self.numbers[0] - 1)
        return super().at(self.numbers[use])


@dataclass(frozen=True, kw_only=True)
class _Worker(Worker):
    """One whose vector is a bucket."""

    numbers: Numbers

    def draw(self, step: int) -> Draw:
        """Random numbers of a step."""
        return _Draw(seed=self.seed, worker=self.rank, step=step, numbers=self.numbers)


class HookState:
    """What a hook keeps on this worker, parameter by parameter, whatever DDP's buckets are.

    `lr` is the learning rate that the next step has.

    Where any worker has NaN or infinity in a bucket, this bucket and those after it become NaN on
    all workers, and what is kept is what was kept before the step: skip such steps, as torch.amp's
    GradScaler does.
    """

    def __init__(
        self,
        algorithm: DataParallel,
        *,
        lr: float | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.lr = algorithm.rule.lr if lr is None else lr
        self.step = 0
        self._carrier = Carrier(group)
        self._seed, self._group = seed, group
        self._numbers: dict[torch.Tensor, int] = {}
        self._buckets: dict[Numbers, tuple[Layout, State]] = {}
        self._before: dict[Numbers, tuple[Layout, State]] = {}
        self._spoilt = False
        self._loose: dict[int, State] = {}
        self._loaded: dict[Numbers, State] = {}
        self._is_plain = (
            isinstance(algorithm.topology, AllReduce)
            and isinstance(algorithm.compress, Dense)
            and isinstance(algorithm.feedback, NoFeedback)
            and algorithm.aggregate.is_mean
        )

    @property
    def lr(self) -> float:
        """The learning rate that the next step has."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        rate = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            rule, legal = "is no learning rate", "a number of at least 0"
            raise ConfigError([Violation(path="lr", value=value, rule=rule, legal=legal)])
        self._lr = float(rate)

    @property
    def nbytes(self) -> int:
        """Bytes of gradients that this worker gave so far, however the backend passes them on."""
        return self._carrier.nbytes

    def reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """The aggregate over all workers of what each has in a bucket."""
        parameters = bucket.parameters()
        numbers = tuple(self._numbers.setdefault(p, len(self._numbers)) for p in parameters)
        turn = Turn(step=self.step, lr=self.lr)
        if bucket.index() == 0:
            self._before, self._spoilt = {}, False
        self.step += bucket.is_last()
        if self._is_plain:
            mean = bucket.buffer().div_(dist.get_world_size(self._group))
            self._carrier.nbytes += mean.numel() * mean.element_size()
            work = dist.all_reduce(mean, group=self._group, async_op=True)
            summed: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
            return summed
        # Gradients may lie in the bucket in another order of dimensions (channels last).
        gradients = bucket.gradients()
        own = torch.cat([gradient.reshape(-1) for gradient in gradients])
        shapes = {str(n): tuple(p.shape) for n, p in zip(numbers, parameters, strict=True)}
        layout = Layout.of(shapes)
        out = self._combined(own, numbers, layout, turn)
        if bucket.is_last():
            self._before = {}
        for gradient, found in zip(gradients, layout.views(out).values(), strict=True):
            gradient.copy_(found)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _combined(
        self, own: torch.Tensor, numbers: Numbers, layout: Layout, turn: Turn
    ) -> torch.Tensor:
        if not self._spoilt:
            bad = (~torch.isfinite(own).all()).float()
            dist.all_reduce(bad, group=self._group)
            self._spoilt = bool(bad)
        if self._spoilt:
            self._buckets |= self._before
            return torch.full_like(own, torch.nan)
        me = _Worker(
            rank=dist.get_rank(self._group),
            n=dist.get_world_size(self._group),
            layout=layout,
            seed=self._seed,
            lr=lambda _step: turn.lr,
            numbers=numbers,
        )
        if numbers not in self._buckets:
            self._buckets[numbers] = (layout, self._gathered(numbers, layout, own, me))
        self._before[numbers] = self._buckets[numbers]
        _, state = self._buckets[numbers]
        program = exchange.combined(self.algorithm, own, state, me, turn)
        out: torch.Tensor
        out, after = self._carrier.play(program, me, own.device)
        self._buckets[numbers] = (layout, after)
        return out

    def state_dict(self) -> dict[str, Any]:
        """All that this worker keeps, which no other has: one for each worker is to be saved.

        Parameters are numbered as their gradients first came, which is the same for the same
        model under DDP.
        """
        cut = dict(self._loose)
        for numbers, (layout, state) in self._buckets.items():
            cut |= _cut(numbers, layout, state, self._by_tensor)
        whole = [
            {"numbers": list(numbers), "state": _whole(state, self._by_tensor)}
            for numbers, (_, state) in self._buckets.items()
        ]
        kept = {"step": self.step, "lr": self.lr, "parameters": cut, "buckets": whole}
        return copy.deepcopy(kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave on this worker.

        Of what is kept by whole buckets (compression "per model", a server's memory) those are
        taken up that DDP makes again; the others start anew, as they do when DDP makes others.

        Raises:
            ConfigError: It is no such state, or that of a hook with another feedback.
        """
        given = copy.deepcopy(dict(state))
        if missing := {"step", "lr", "parameters", "buckets"} - set(given):
            rule, legal = f"lacks {', '.join(sorted(missing))}", "what state_dict() gave"
            raise ConfigError([Violation(path="state", value=None, rule=rule, legal=legal)])
        names = set(self.algorithm.feedback.init(torch.zeros(1)))
        for number, piece in given["parameters"].items():
            if set(piece["feedback"]) != names:
                held = ", ".join(sorted(piece["feedback"])) or "nothing"
                raise _unlike(number, f"holds {held} of another feedback", "the same feedback")
        self.step, self.lr = given["step"], given["lr"]
        self._loose = {int(number): each for number, each in given["parameters"].items()}
        self._loaded = {tuple(each["numbers"]): each["state"] for each in given["buckets"]}
        self._buckets = {}

    @property
    def _by_tensor(self) -> bool:
        return self.algorithm.compress.per == "tensor"

    def _gathered(self, numbers: Numbers, layout: Layout, own: torch.Tensor, me: Worker) -> State:
        """The state of a bucket that is new: from those that held its parameters before."""
        for other in [each for each in self._buckets if set(each) & set(numbers)]:
            self._loose |= _cut(other, *self._buckets.pop(other), self._by_tensor)
        state = exchange.init(self.algorithm, own, me)
        feedback, compress = dict(state["feedback"]), dict(state["compress"])
        for index, (number, segment) in enumerate(zip(numbers, layout.segments, strict=True)):
            piece = self._loose.pop(number, None)
            if piece is None:
                continue
            for name, value in piece["feedback"].items():
                if not torch.is_tensor(value):
                    feedback[name] = value
                    continue
                _fits(number, value.numel(), segment.stop - segment.start)
                feedback[name][segment.start : segment.stop] = value
            if self._by_tensor:
                compress[str(index)] = _moved(piece["compress"], own.device)
        whole = _moved(self._loaded.pop(numbers, {}), own.device)
        return {**state, "feedback": feedback, "compress": compress, **whole}


def _first(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return done.value()[0]


def _cut(numbers: Numbers, layout: Layout, state: State, by_tensor: bool) -> dict[int, State]:
    """What is kept of each parameter of a bucket."""
    pieces = {}
    for index, (number, segment) in enumerate(zip(numbers, layout.segments, strict=True)):
        feedback = {
            name: value[segment.start : segment.stop].clone() if torch.is_tensor(value) else value
            for name, value in state["feedback"].items()
        }
        compress = state["compress"].get(str(index), {}) if by_tensor else {}
        pieces[number] = {"feedback": feedback, "compress": compress}
    return pieces


def _whole(state: State, by_tensor: bool) -> State:
    """What is kept of a bucket as a whole."""
    names = ("aggregate", "topology") if by_tensor else ("aggregate", "topology", "compress")
    return {name: state[name] for name in names}


def _moved(state: Any, device: torch.device) -> Any:
    if isinstance(state, dict):
        return {name: _moved(value, device) for name, value in state.items()}
    return state.to(device) if torch.is_tensor(state) else state


def _fits(number: int, held: int, wanted: int) -> None:
    if held != wanted:
        raise _unlike(
            number, f"holds {held} entries of a parameter that has {wanted}", "the same model"
        )


def _unlike(number: int, rule: str, same: str) -> ConfigError:
    path, legal = f"state.parameters[{number}]", f"the state of a hook of {same}"
    return ConfigError([Violation(path=path, value=None, rule=rule, legal=legal)])
