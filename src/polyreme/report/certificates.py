"""Curves of a linear model's objective and of how far it may be above its optimum."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .attempts import led_to_end, stands
from .figures import axes_of
from .plot import Figure, Plot
from .runs import Run
from .words import number

_NOISE = 1e-14
_MARKED = 60  # certificates up to which each has a mark


class Certificates(msgspec.Struct, frozen=True, kw_only=True):
    """Models of a run that have a certificate, in their order: after how many steps, and when.

    `bound` is the highest that the optimum is known to be at least, from all of them.
    """

    steps: np.ndarray
    seconds: np.ndarray
    objective: np.ndarray
    gap: np.ndarray

    @property
    def bound(self) -> float:
        """-inf where no gap is known."""
        known = (self.objective - self.gap)[np.isfinite(self.gap)]
        return float(known.max(initial=-np.inf))

    @property
    def above(self) -> np.ndarray:
        """By how much each is above the best bound: at most its own gap. NaN where rounding is."""
        found = self.objective - self.bound
        return np.where(found > _NOISE * np.abs(self.objective), found, np.nan)


def certificates(run: Run) -> Certificates | None:
    """Of rounds, which are of the model before them, and of evaluations."""
    found: dict[int, tuple[float, float, float | None]] = {}
    for event, led in zip(run.steps, led_to_end(run), strict=True):
        if led and event.objective is not None:
            found[event.step - 1] = event.t - event.step_s, event.objective, event.gap
    for scored in run.evals:
        objective = scored.metrics.get("objective")
        if objective is not None and stands(run, scored.attempt, scored.step):
            found[scored.step] = scored.t, objective, scored.metrics.get("gap")
    if not found:
        return None
    rows = [(step, *found[step]) for step in sorted(found)]
    steps, seconds, objectives, gaps = zip(*rows, strict=True)
    return Certificates(
        steps=np.array(steps, dtype=np.int64),
        seconds=np.maximum(np.array(seconds, dtype=np.float64), 0.0),
        objective=np.array(objectives, dtype=np.float64),
        gap=np.array([np.nan if each is None else each for each in gaps], dtype=np.float64),
    )


def curves(run: Run) -> tuple[Figure, ...]:
    """The objective; and what it may be above its optimum, if any of that is known."""
    found = certificates(run)
    if found is None:
        return ()
    plot = Plot(axes_of(run))
    _line(plot, "objective", found, found.objective, "loss")
    alt = f"objective from {number(found.objective[0])} to {number(found.objective[-1])}"
    drawn = [plot.figure("objective", "Objective", alt, "")]
    gaps = found.gap[found.gap > 0]
    if gaps.size:
        plot = Plot(axes_of(run))
        _line(plot, "duality gap", found, found.gap, "heldout")
        _line(plot, "objective less the best bound", found, found.above, "loss")
        _asked(plot, run, found)
        alt = f"duality gap from {gaps[0]:.1e} to {gaps[-1]:.1e}, logarithmic"
        title = "Above the optimum, at most"
        drawn.append(_logarithmic(plot.figure("gap", title, alt, "")))
    return tuple(drawn)


def overlaid(runs: Sequence[Run]) -> Figure | None:
    """The duality gap of every run that has one."""
    joined: Plot | None = None
    names = []
    for index, run in enumerate(runs):
        found = certificates(run)
        if found is None or not (found.gap > 0).any():
            continue
        plot = Plot(axes_of(run))
        _line(plot, run.name, found, found.gap, f"run{index % 8}")
        plot.data[-1]["mode"] = "lines" if len(found.steps) > 1 else "markers"
        plot.data[-1]["line"]["dash"] = ("solid", "dash", "dot")[index // 8 % 3]
        names.append(run.name)
        if joined is None:
            joined = plot
            continue
        joined.data += plot.data
        for axis, xs in plot.xs.items():
            joined.xs[axis] += xs
    if joined is None:
        return None
    alt = "duality gap of " + ", ".join(names)
    return _logarithmic(joined.figure("gaps", "Duality gap", alt, ""))


def _line(plot: Plot, label: str, found: Certificates, values: np.ndarray, meaning: str) -> None:
    shown = values if label == "objective" else np.where(values > 0, values, np.nan)
    plot.points(label, found.steps, found.seconds, shown, meaning)
    if len(values) > _MARKED:
        plot.data[-1]["mode"] = "lines"


def _asked(plot: Plot, run: Run, found: Certificates) -> None:
    """The gap that ends the run."""
    train = run.spec.get("train")
    asked = train.get("gap") if isinstance(train, dict) else None
    if isinstance(asked, int | float) and asked > 0 and len(found.steps) > 1:
        ends = [0, -1]
        values = np.array([asked, asked], dtype=np.float64)
        plot.points(
            "ends the run (train.gap)", found.steps[ends], found.seconds[ends], values, "baseline"
        )


def _logarithmic(figure: Figure) -> Figure:
    figure.layout["yaxis"] |= {"type": "log", "exponentformat": "e"}
    return figure
