"""Holds a run to a reference, step by step: losses, gradients, parameters, on every rank."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..errors import RunError
from .gathering import Form, forms, gathered, weights
from .job import Job
from .loop import train
from .mesh import World
from .outcome import Outcome
from .parted import Parted, parted
from .state import Progress, State
from .widened import Widened

_FLOOR = 1e-3  # of the norm over all tensors: below that a tensor is not held to its own norm


class Oracle(Protocol):
    """The same training in one process; steps count from 0."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Parameters by whole-model name, with their gradients."""

    def gradients(self, step: int) -> tuple[float, float]:
        """Set the gradients of a step; its mean loss and the labels that carry it."""

    def update(self, step: int) -> None:
        """Update the parameters."""


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """What counts as the same.

    `loss` bounds the relative error of a step's loss; `tensor` the norm of a difference, over the
    tensor's own norm or a thousandth of the norm over all tensors, whichever is more.
    With `apart` each takes its own steps, and parameters are compared after the last. Without,
    the oracle starts each step from the run's parameters and updates by the run's gradients, and
    the updates are compared: where rounding is coarse, two runs part on their own (a unit of ReLU
    that is on in one of them is enough, and Adam makes whole steps of rounding alone).
    """

    loss: float
    tensor: float
    apart: bool = True


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What is not the same: the first of its kind, and in words how much and where."""

    name: str | None
    words: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The largest errors over all ranks and steps, and the first difference, if any.

    `max_parameter_error` is of parameters, or of their updates where those are compared.
    """

    steps: int
    max_loss_error: float = 0.0
    max_grad_error: float = 0.0
    max_parameter_error: float = 0.0
    first: Difference | None = None


class _Differs(Exception):
    """Something is not the same: ends the run early, on all ranks."""


def verify(
    job: Job, world: World, oracle: Oracle | None, *, n_steps: int, tolerance: Tolerance
) -> Verdict:
    """Train up to `n_steps` steps beside the oracle, which rank 0 has; the same on all ranks.

    Initial parameters are compared, then the loss, its weight and the mean gradients of every
    step, then the parameters or the updates that came of it. The run ends at the first step that
    differs.

    Raises RunError where a step was skipped as not finite.
    """
    assert world.is_first == (oracle is not None), "rank 0 has the oracle"
    settings = msgspec.structs.replace(
        job.train, eval_every=None, checkpoint_every=None, compile=False, max_skipped=0
    )
    lockstep = _Lockstep(world, oracle, n_steps, tolerance)
    try:
        outcome = _trained(
            dataclasses.replace(job, train=settings, folder=None),
            world,
            stop=lockstep.is_last,
            load=lockstep.compare_initial,
            on_gradients=lockstep.compare_step,
        )
        lockstep.compare_final(outcome.state)
    except _Differs:
        pass
    except RunError as error:
        raise RunError(f"the run cannot be verified: {error}") from error
    return lockstep.verdict


def _trained(job: Job, world: World, **asked: Any) -> Outcome:
    """The run; under float64 nothing in it, nor in the oracle, is rounded to less."""
    with Widened() if job.plan.precision == "fp64" else nullcontext():
        return train(job, world, **asked)


class _Lockstep:
    """Compares on all ranks together; raises _Differs on all of them."""

    def __init__(
        self, world: World, oracle: Oracle | None, n_steps: int, tolerance: Tolerance
    ) -> None:
        self._world, self._oracle = world, oracle
        self._n_steps, self._tolerance = n_steps, tolerance
        self._state: State | None = None
        self._forms: dict[str, Form] = {}  # of the model's parameters
        self._moved: dict[str, float] = {}  # norms of the oracle's last update
        self.verdict = Verdict(steps=0)

    def is_last(self) -> bool:
        """Whether the step that begins is the last: then nothing is evaluated after it."""
        return self.verdict.steps >= self._n_steps - 1

    def compare_initial(self, state: State) -> Progress:
        """Hold the parameters before the first step to the oracle's."""
        self._state = state
        known = weights(state.applied)
        every = forms(known, state.applied, self._world)
        buffers = {n for each in self._world.gather(_buffers(state)) for n in each}
        self._forms = {name: form for name, form in every.items() if name not in buffers}
        masters = state.applied.masters
        found = self._unmatched(set(state.applied.names))
        self._conclude(None if found is None else Difference(name=found[0], words=found[1]))
        worst, wrong = self._errors(masters, self._expected())
        self._note(max_parameter_error=worst)
        self._conclude(_named(wrong, "initial value", "before the first step", self._tolerance))
        return Progress()

    def compare_step(
        self, gradients: Mapping[str, torch.Tensor | None], *, loss: float, weight: float
    ) -> None:
        """Hold a step to the oracle's, then let the oracle take it too."""
        assert self._state is not None, "initial values were compared"
        masters, number = self._state.applied.masters, self.verdict.steps + 1
        if not self._tolerance.apart:
            if number > 1:
                self._compare_update(masters)
            self._follow(masters)
        before: Difference | None = None
        expected: dict[str, torch.Tensor | None] = {}
        if self._oracle is not None:
            with self._world.record.doing("running the reference"):
                known_loss, known_weight = self._oracle.gradients(number - 1)
            before = self._loss(number, loss, weight, known_loss, known_weight)
            parameters = self._oracle.parameters
            expected = {name: parameters[name].grad for name in self._state.applied.names}
        trained = set(self._state.applied.names)
        worst, wrong = self._errors(gradients, expected, names=trained)
        self._note(steps=number, max_grad_error=worst)
        found = _named(wrong, "gradient", f"in step {number}", self._tolerance)
        if found is not None and before is not None:
            found = Difference(name=found.name, words=f"{found.words}; {before.words}")
        self._conclude(found or before)
        if not self._tolerance.apart:
            self._take(gradients, trained)
        if self._oracle is not None:
            before_update = _copied(self._oracle.parameters) if not self._tolerance.apart else {}
            self._oracle.update(number - 1)
            after = self._oracle.parameters
            self._moved = {name: _norm(after[name] - old) for name, old in before_update.items()}

    def compare_final(self, state: State) -> None:
        """Hold the parameters after the last step, or its update, to the oracle's."""
        if not self._tolerance.apart:
            self._compare_update(state.applied.masters)
            return
        worst, wrong = self._errors(state.applied.masters, self._expected())
        self._note(max_parameter_error=worst)
        when = f"after step {self.verdict.steps}"
        self._conclude(_named(wrong, "value", when, self._tolerance))

    def _compare_update(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Hold the update of the last step, from the same parameters and gradients."""
        worst, wrong = self._errors(masters, self._expected(), moved=self._moved)
        self._note(max_parameter_error=worst)
        when = f"in step {self.verdict.steps}"
        self._conclude(_named(wrong, "update", when, self._tolerance))

    def _follow(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Give the oracle the parameters that the run is at."""
        for name in self._forms:
            whole = self._whole(name, masters.get(name))
            if self._oracle is not None:
                assert whole is not None, "the oracle is where tensors are gathered"
                with torch.no_grad():
                    self._oracle.parameters[name].copy_(whole)

    def _take(self, gradients: Mapping[str, torch.Tensor | None], trained: set[str]) -> None:
        """Give the oracle the gradients of the run; None is of what nothing used."""
        used = {n for names in self._world.gather(_there(gradients)) for n in names}
        for name in self._forms:
            if name not in trained:
                continue
            whole = self._whole(name, gradients.get(name)) if name in used else None
            if self._oracle is not None:
                self._oracle.parameters[name].grad = None if whole is None else whole.clone()

    def _expected(self) -> dict[str, torch.Tensor | None]:
        return {} if self._oracle is None else dict(self._oracle.parameters)

    def _unmatched(self, trained: set[str]) -> tuple[str, str] | None:
        """A parameter that only one of the two has or trains, or has in another shape."""
        if self._oracle is None:
            return None
        known = self._oracle.parameters
        covered = set()
        for name, form in self._forms.items():
            if name not in known:
                return name, f"{name} is no parameter of the reference"
            covered.add(id(known[name]))
            if tuple(known[name].shape) != form.shape:
                return name, f"{name} has shape {list(form.shape)}, not {list(known[name].shape)}"
            if known[name].requires_grad != (name in trained):
                which = "the plan" if name in trained else "the reference"
                return name, f"{name} is trained by {which} alone"
        left = [name for name, tensor in known.items() if id(tensor) not in covered]
        return (left[0], f"{left[0]} is no parameter of the plan") if left else None

    def _loss(
        self, number: int, loss: float, weight: float, known_loss: float, known_weight: float
    ) -> Difference | None:
        error = abs(loss - known_loss) / max(abs(known_loss), 1e-300)
        self._note(max_loss_error=error)
        words = []
        if weight != known_weight:
            words.append(f"{weight:g} labels carry loss, not {known_weight:g}")
        if not error <= self._tolerance.loss:
            words.append(f"the loss is {loss:.12g}, not {known_loss:.12g} ({error:.1e} relative)")
        if not words:
            return None
        return Difference(name=None, words=f"in step {number} {' and '.join(words)}")

    def _errors(
        self,
        tensors: Mapping[str, torch.Tensor | None],
        expected: Mapping[str, torch.Tensor | None],
        moved: Mapping[str, float] | None = None,
        names: set[str] | None = None,
    ) -> tuple[float, list[tuple[str, float, int]]]:
        """The largest error, and (name, error, rank) of each tensor that differs, on rank 0.

        Every rank holds what it has (shards gathered) to what rank 0 expects; one that has no part
        of a tensor finds no difference. With `moved` errors are of updates with these norms; a
        unit in the last place of each value is none. `names` are those compared (unset: all).
        """
        norms, own = [], []
        compared = [name for name in self._forms if names is None or name in names]
        for name in compared:
            tensor = tensors.get(name)
            difference, norm = self._difference(
                name, tensor, expected.get(name), held=name in tensors
            )
            if moved is not None:
                eps = 0.0 if tensor is None else torch.finfo(tensor.dtype).eps
                difference = max(difference - eps * norm, 0.0)
                norm = moved.get(name, 0.0)
            own.append(difference)
            norms.append(norm)
        ranks: list[list[float]] = self._world.gather(own)
        floor = _FLOOR * math.hypot(*norms)
        worst, wrong = 0.0, []
        for index, name in enumerate(compared):
            scale = max(norms[index], floor)
            errors = [_ratio(row[index], scale) for row in ranks]
            rank = max(range(len(errors)), key=lambda at: _sortable(errors[at]))
            worst = max(worst, errors[rank], key=_sortable)
            if not errors[rank] <= self._tolerance.tensor:
                wrong.append((name, errors[rank], rank))
        return worst, wrong

    def _difference(
        self,
        name: str,
        tensor: torch.Tensor | None,
        expected: torch.Tensor | None,
        *,
        held: bool,
    ) -> tuple[float, float]:
        """Norms of this rank's difference and of what is expected; tensors are dropped at once.

        None is what nothing used: all zero.
        """
        world, state = self._world, self._state
        assert state is not None, "initial values were compared"
        target = self._forms[name].empty(world.device)
        if self._oracle is not None:
            target = torch.zeros_like(target) if expected is None else expected.detach().clone()
        if world.group is not None:
            with world.record.inside("broadcast", target, world.n_ranks):
                dist.broadcast(target, 0, group=world.group)
        norm = _norm(target)
        if not held:
            return 0.0, norm
        if tensor is None:
            return norm, norm
        own = self._parted(name, tensor)
        live = own.tensor.detach()
        if isinstance(live, DTensor):
            with world.record.inside("all_gather", live, state.applied.grid.shard):
                live = live.full_tensor()
        whole = dataclasses.replace(own, tensor=live)
        squares = [_norm(part.local - target[part.place]) ** 2 for part in whole.parts(name)]
        return math.sqrt(sum(squares)), norm

    def _parted(self, name: str, tensor: torch.Tensor) -> Parted:
        state = self._state
        assert state is not None, "initial values were compared"
        where = state.applied.where[name]
        return parted(tensor, where.cut, where.pipes, state.applied.places)

    def _whole(self, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor on rank 0; all ranks call it together."""
        state = self._state
        assert state is not None, "initial values were compared"
        own = None if tensor is None else self._parted(name, tensor)
        return gathered(name, own, self._forms[name], state.applied, self._world)

    def _note(self, **largest: float) -> None:
        """Keep the larger of what was and what is found."""
        kept = {
            name: max(getattr(self.verdict, name), value, key=_sortable)
            for name, value in largest.items()
        }
        self.verdict = msgspec.structs.replace(self.verdict, **kept)

    def _conclude(self, found: Difference | None) -> None:
        """Tell all ranks what rank 0 found."""
        verdict = msgspec.structs.replace(self.verdict, first=found)
        self.verdict = self._world.gather(verdict)[0]
        if self.verdict.first is not None:
            raise _Differs


def _named(
    wrong: Sequence[tuple[str, float, int]], what: str, when: str, tolerance: Tolerance
) -> Difference | None:
    """The first of what is wrong, in words."""
    if not wrong:
        return None
    name, error, rank = wrong[0]
    others = f"; {len(wrong) - 1} others differ too" if len(wrong) > 1 else ""
    words = (
        f"{when} the {what} of {name} differs by {error:.1e} on rank {rank}, "
        f"more than {tolerance.tensor:g}{others}"
    )
    return Difference(name=name, words=words)


def _buffers(state: State) -> list[str]:
    return [slot.name for slot in state.applied.buffers]


def _there(tensors: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor is not None]


def _copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))


def _ratio(difference: float, scale: float) -> float:
    if difference == 0:
        return 0.0
    return difference / scale if scale else math.inf


def _sortable(error: float) -> float:
    """Errors by size; one that is no number is the largest."""
    return math.inf if math.isnan(error) else error
