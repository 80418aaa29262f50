"""The curves of one run, and of several laid over each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..units import count
from .attempts import led_to_end, restarts, stands
from .plot import Axes, Figure, Plot, smoothed
from .runs import Run
from .trouble import run_spikes
from .words import number

TIME_BINS = 48
CERTIFIED = frozenset(
    ("objective", "gap", "gradient")
)  # of a model's certificate, not of how it predicts
BASELINES = {
    "bigram_loss": "bigram model (baseline)",
    "unigram_loss": "unigram model (baseline)",
}


def column(run: Run, field: str) -> np.ndarray:
    """A field of every step as float64; NaN where it is null."""
    values = [getattr(event, field) for event in run.steps]
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def learning(run: Run) -> Figure | None:
    """Training and held-out loss with baselines, and what happened on the way below them."""
    plot, led = Plot(axes_of(run)), led_to_end(run)
    kept, lost = np.flatnonzero(led), np.flatnonzero(~led)
    every = column(run, "loss")
    loss = every[kept]
    if len(loss):
        many = len(loss) > 60
        plot.line("training, each step" if many else "training", loss, "loss", at=kept, faint=many)
        if many:
            plot.line("training, smoothed", smoothed(loss), "loss", at=kept)
    for part in np.split(lost, np.flatnonzero(np.diff(lost) > 1) + 1) if len(lost) else ():
        plot.line("taken back by a restart", every[part], "restart", at=part, faint=True)
        plot.data[-1]["showlegend"] = bool(part[0] == lost[0])
    for name in _metric_names(run, loss=True):
        _metric(plot, run, name)
    _marks(plot, run)
    finite = loss[np.isfinite(loss)]
    alt = (
        f"training loss from {number(finite[0])} to {number(finite[-1])} over "
        f"{count(len(loss), 'step')}"
        if finite.size
        else "no finite training loss"
    )
    return plot.figure("learning", "Loss", alt, "nats", lane=True, log_switch=True)


def metrics(run: Run) -> Figure | None:
    """Every other metric of the evaluations."""
    names = [name for name in _metric_names(run, loss=False) if name not in CERTIFIED]
    plot = Plot(axes_of(run))
    for name in names:
        _metric(plot, run, name)
    return plot.figure("metrics", "Metrics", ", ".join(names), "") if names else None


def rates(run: Run) -> tuple[Figure, ...]:
    """Learning rate, and gradient norm."""
    found = []
    for field, title, colour in (
        ("lr", "Learning rate", "lr"),
        ("grad_norm", "Gradient norm", "norm"),
    ):
        kept = np.flatnonzero(led_to_end(run))
        values = column(run, field)[kept]
        if np.isfinite(values).any():
            plot = Plot(axes_of(run))
            plot.line(title.lower(), values, colour, at=kept)
            alt = f"{title.lower()}, last {number(values[np.isfinite(values)][-1])}"
            found.append(plot.figure(field, title, alt, "", from_zero=True))
    return tuple(found)


def throughput(run: Run) -> Figure | None:
    """Samples per second of each step."""
    if not run.steps:
        return None
    kept = np.flatnonzero(led_to_end(run))
    step_s = column(run, "step_s")[kept]
    samples = column(run, "samples")[kept]
    rate = np.divide(samples, step_s, where=step_s > 0, out=step_s * np.nan)
    plot = Plot(axes_of(run))
    many = len(kept) > 60
    label = "each step" if many else "samples per second"
    plot.line(label, rate, "compute", at=kept, faint=many)
    if many:
        plot.line("smoothed", smoothed(rate), "compute", at=kept)
    _verticals(plot, run)
    middle = np.nanmedian(rate) if np.isfinite(rate).any() else None
    alt = f"median {number(middle)} samples per second"
    return plot.figure("throughput", "Throughput", alt, "samples per second", from_zero=True)


def step_time(run: Run) -> Figure | None:
    """Mean compute, communication and waiting of a step, in stretches of the run."""
    if not run.steps:
        return None
    axes = axes_of(run)
    kept = np.flatnonzero(led_to_end(run))
    stretches = np.array_split(kept, min(TIME_BINS, len(kept))) if len(kept) else []
    middles = np.array([stretch[len(stretch) // 2] for stretch in stretches], dtype=np.int64)
    plot = Plot(axes)
    for field, label in (
        ("compute_s", "compute"),
        ("comm_s", "communication"),
        ("wait_s", "waiting"),
    ):
        values = column(run, field)
        means = np.array([values[stretch].mean() for stretch in stretches])
        plot.bars(label, middles, means, label)
    figure = plot.figure(
        "step_time", "Where step time went", "stacked bars", "seconds a step", from_zero=True
    )
    figure.layout.update(barmode="stack", bargap=0.08)
    return figure


def overlaid(runs: Sequence[Run]) -> Figure | None:
    """Training loss of every run, smoothed, and held-out loss as points."""
    plots = []
    for index, run in enumerate(runs):
        if not run.steps:
            continue
        plot = Plot(axes_of(run))
        kept = np.flatnonzero(led_to_end(run))
        loss = column(run, "loss")[kept]
        plot.line(run.name, smoothed(loss), f"run{index % 8}", at=kept, dash=index)
        if any("heldout_loss" in event.metrics for event in run.evals):
            _metric(plot, run, "heldout_loss")
            plot.data[-1].update(
                name=f"{run.name}, held-out", meta=f"run{index % 8}", showlegend=False
            )
            plot.data[-1]["mode"] = "markers"
        plots.append(plot)
    if not plots:
        return None
    joined = Plot(plots[0].axes)
    joined.data = [trace for plot in plots for trace in plot.data]
    joined.xs = {
        name: [x for plot in plots for x in plot.xs[name]] for name in ("steps", "seconds", "wire")
    }
    alt = "training loss of " + ", ".join(run.name for run in runs)
    return joined.figure("overlaid", "Loss", alt, "nats", log_switch=True)


def axes_of(run: Run) -> Axes:
    """Where the steps of a run lie on each of the axes."""
    return Axes(
        np.array([event.step for event in run.steps], dtype=np.int64),
        np.array([event.t for event in run.steps], dtype=np.float64),
        np.cumsum(
            [e.wire_bytes * n for e, n in zip(run.steps, run.covered, strict=True)],
            dtype=np.float64,
        ),
    )


def _metric_names(run: Run, *, loss: bool) -> list[str]:
    names = dict.fromkeys(name for event in run.evals for name in event.metrics)
    return [name for name in names if name.endswith("loss") == loss]


def _metric(plot: Plot, run: Run, name: str) -> None:
    found = [e for e in run.evals if name in e.metrics and stands(run, e.attempt, e.step)]
    steps = np.array([event.step for event in found], dtype=np.int64)
    times = np.array([event.t for event in found], dtype=np.float64)
    values = np.array([event.metrics[name] for event in found], dtype=np.float64)
    if name in BASELINES and run.steps and len(values):
        first, last = run.steps[0], max(run.steps, key=lambda event: (event.step, event.t))
        ends, moments = np.array([first.step, last.step]), np.array([first.t, last.t])
        plot.points(BASELINES[name], ends, moments, np.repeat(values[-1], 2), "baseline")
        return
    label = "held-out" if name == "heldout_loss" else name
    plot.points(label, steps, times, values, "heldout")


def _marks(plot: Plot, run: Run) -> None:
    spiked = run_spikes(run)
    if spiked:
        plot.spots(
            "spike",
            np.array([each.step for each in spiked], dtype=np.int64),
            np.array([each.t for each in spiked], dtype=np.float64),
            np.array([each.loss for each in spiked], dtype=np.float64),
            [f"step {e.step}: {number(e.loss)}, {number(e.rise)} above usual" for e in spiked],
            "spike",
        )
    skipped = [event for event in run.steps if event.skipped]
    plot.marks(
        "step skipped",
        [(event.step, event.t) for event in skipped],
        [f"step {event.step} skipped: {event.reason or 'not finite'}" for event in skipped],
        "skipped",
        "x",
    )
    plot.marks("fault", _fault_moments(run), [e.what for e in run.faults], "fault", "diamond")
    plot.marks(
        "checkpoint",
        [(event.step, event.t) for event in run.checkpoints],
        [f"checkpoint at step {event.step}" for event in run.checkpoints],
        "checkpoint",
        "triangle-up",
    )
    again = restarts(run)
    plot.marks(
        "restart",
        [(each.step, each.t) for each in again],
        [f"attempt {each.attempt} from step {each.step}" for each in again],
        "restart",
        "line-ns-open",
    )
    _verticals(plot, run)


def _verticals(plot: Plot, run: Run) -> None:
    plot.verticals(_fault_moments(run), "fault")
    plot.verticals([(each.step, each.t) for each in restarts(run)], "restart")


def _fault_moments(run: Run) -> list[tuple[int, float]]:
    return [(step_at(run, event.t), event.t) for event in run.faults]


def step_at(run: Run, t: float) -> int:
    """The last step logged before a time; 0 before the first."""
    place = np.searchsorted([event.t for event in run.steps], t, side="right")
    return run.steps[int(place) - 1].step if place else 0
