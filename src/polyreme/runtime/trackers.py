"""Experiment trackers, fed from the events of a run; each is an extra, imported when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from ..errors import ConfigError, Violation
from ..runlog import EvalEvent, Event, StepEvent

Name = Literal["tensorboard", "wandb"]
_STEP_FIELDS = (
    "loss",
    "grad_norm",
    "lr",
    "step_s",
    "compute_s",
    "comm_s",
    "wait_s",
    "hidden_s",
    "wire_bytes",
    "memory_bytes",
)


class Tracker(Protocol):
    """Where numbers go besides the log."""

    def write(self, event: Event) -> None:
        """Take an event; those without numbers are passed over."""

    def close(self) -> None:
        """Hand over what is left."""


def open_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """Trackers by name, which keep their files in the run folder; rank 0 alone opens them.

    Raises ConfigError, with all that is wrong, for unknown names and missing packages.
    """
    opened: list[Tracker] = []
    violations = []
    for index, name in enumerate(names):
        path = f"report.trackers[{index}]"
        try:
            opened.append(_open(name, folder))
        except ImportError as error:
            rule = f"needs a package that cannot be imported ({error})"
            legal = f'pip install "polyreme[{name}]"'
            violations.append(Violation(path=path, value=name, rule=rule, legal=legal))
        except KeyError:
            legal = ", ".join(get_args(Name))
            violations.append(Violation(path=path, value=name, rule="is no tracker", legal=legal))
    if violations:
        for tracker in opened:
            tracker.close()
        raise ConfigError(violations)
    return opened


def _open(name: str, folder: Path) -> Tracker:
    kinds: dict[str, type[TensorBoard] | type[WeightsAndBiases]]
    kinds = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}
    return kinds[name](folder)


class TensorBoard:
    """Event files in ``tensorboard/`` of the run folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, event: Event) -> None:
        """Add the event's numbers as scalars."""
        for name, value in _scalars(event):
            self._writer.add_scalar(name, value, _step(event))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; its files lie in ``wandb/`` of the run folder.

    It is named as the folder, and each attempt is a run of its own in a group of that name.
    Where it sends them is its own affair: ``WANDB_MODE=offline`` keeps them here.
    """

    def __init__(self, folder: Path) -> None:
        import wandb

        name = folder.resolve().name
        self._run: Any = wandb.init(project="polyreme", name=name, group=name, dir=str(folder))

    def write(self, event: Event) -> None:
        """Log the event's numbers at its step."""
        scalars = dict(_scalars(event))
        if scalars:
            self._run.log(scalars, step=_step(event))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _scalars(event: Event) -> Iterator[tuple[str, float]]:
    """Names and values; a skipped step has no loss."""
    if isinstance(event, StepEvent):
        for name in _STEP_FIELDS:
            value = getattr(event, name)
            if value is not None:
                yield f"train/{name}", float(value)
    elif isinstance(event, EvalEvent):
        for name, metric in event.metrics.items():
            if metric is not None:
                yield f"eval/{name}", float(metric)


def _step(event: Event) -> int:
    return getattr(event, "step", 0)
