"""One plot: traces gathered as plain dicts in plotly's form, with an x for every way to look.

Traces name their colour by meaning (``meta``); the page's script turns that into the colour of
the theme. Arrays travel in binary form, and long ones are thinned.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

MAX_POINTS = 2000  # of one curve; a curve is drawn on at most about 1200 pixels
MAX_MARKS = 200  # of one kind of event
_MOST_F4 = float(np.finfo(np.float32).max)
Trace = dict[str, Any]


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One plot. `xs` holds, for each way to look at it, the x of every trace (None: as it is)."""

    name: str
    title: str
    alt: str
    data: list[Trace]
    layout: dict[str, Any]
    xs: dict[str, list[Any]]
    log_switch: bool = False


class Axes(msgspec.Struct, frozen=True):
    """Positions of the steps of a run on each x axis."""

    steps: np.ndarray
    seconds: np.ndarray
    wire: np.ndarray

    def when(self, steps: np.ndarray, times: np.ndarray) -> dict[str, Any]:
        """Packed positions of moments, given by step and time; sent are the bytes until then."""
        wire = np.concatenate([[0.0], self.wire])
        place = np.searchsorted(self.seconds, times, side="right")
        return {"steps": packed(steps), "seconds": packed(times), "wire": packed(wire[place])}

    def at(self, index: np.ndarray) -> dict[str, Any]:
        """Packed positions of some of the steps."""
        return {name: packed(getattr(self, name)[index]) for name in ("steps", "seconds", "wire")}


def packed(values: np.ndarray) -> dict[str, str]:
    """An array in plotly's binary form; integers as int32, numbers that float32 holds as that."""
    if values.dtype.kind in "iu" and values.size and values.max() < 2**31:
        kind = "i4"
    else:
        huge = np.isfinite(values) & (np.abs(values) > _MOST_F4)
        kind = "f8" if huge.any() else "f4"
    data = np.ascontiguousarray(values.astype(f"<{kind}"))
    return {"dtype": kind, "bdata": base64.b64encode(data.tobytes()).decode()}


def thinned(values: np.ndarray, limit: int = MAX_POINTS) -> np.ndarray:
    """Indices that keep the extremes of equal stretches; all of them where there are few.

    A stretch without any number keeps its first index, so that the gap shows.
    """
    n = len(values)
    if n <= limit:
        return np.arange(n)
    kept = {0, n - 1}
    for stretch in np.array_split(np.arange(n), max(1, limit // 2)):
        finite = stretch[np.isfinite(values[stretch])]
        if not finite.size:
            kept.add(int(stretch[0]))
            continue
        kept.add(int(finite[np.argmin(values[finite])]))
        kept.add(int(finite[np.argmax(values[finite])]))
    return np.array(sorted(kept))


def smoothed(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of about a fiftieth of the curve.

    It narrows at the start, where curves are steep, and is cut off at the end. NaN where the
    window holds no number; a number that is NaN takes no part.
    """
    n = len(values)
    known = np.isfinite(values)
    place = np.arange(n)
    most = max(2, n // 100)
    half = np.minimum(most, place)
    low, high = place - half, np.minimum(place + half + 1, n)
    found = _windows(known.astype(np.float64), low, high, 2 * most + 1)
    means = np.full(n, np.nan)
    with np.errstate(over="ignore"):  # a mean that float64 does not hold is infinite: a gap
        sums = _windows(np.where(known, values, 0.0), low, high, 2 * most + 1)
    np.divide(sums, found, where=found > 0, out=means)
    return means


def _windows(values: np.ndarray, low: np.ndarray, high: np.ndarray, width: int) -> np.ndarray:
    """Sums of values[low:high]: of `width` entries, fewer only at the start and at the end.

    Each is the end of one block and the start of the next. Nothing is subtracted, so that a huge
    value is in no sum but its own.
    """
    n_blocks = -(-len(values) // width)
    blocks = np.zeros((n_blocks, width))
    blocks.reshape(-1)[: len(values)] = values
    until = np.cumsum(blocks, axis=1).reshape(-1)[high - 1]
    since = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1].reshape(-1)[low]
    one_block = low // width == (high - 1) // width
    sums: np.ndarray = np.where(one_block, np.where(low % width == 0, until, since), since + until)
    return sums


class Plot:
    """Gathers the traces of one figure."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.data: list[Trace] = []
        self.xs: dict[str, list[Any]] = {"steps": [], "seconds": [], "wire": []}

    def _add(self, trace: Trace, xs: Mapping[str, Any]) -> None:
        self.data.append(trace)
        for name, x in xs.items():
            self.xs[name].append(x)

    def line(
        self,
        label: str,
        values: np.ndarray,
        meaning: str,
        *,
        at: np.ndarray | None = None,
        faint: bool = False,
        dash: int = 0,
    ) -> None:
        """A curve over all logged steps, or those whose places are given."""
        index = thinned(values)
        trace: Trace = {
            "type": "scatter",
            "mode": "lines+markers" if len(index) < 3 else "lines",
            "name": label,
            "y": packed(values[index]),
            "meta": meaning,
            "line": {"width": 1 if faint else 2, "dash": ("solid", "dash", "dot")[dash // 8 % 3]},
            "opacity": 0.35 if faint else 1,
        }
        self._add(trace, self.axes.at(index if at is None else at[index]))

    def points(
        self, label: str, steps: np.ndarray, times: np.ndarray, values: np.ndarray, meaning: str
    ) -> None:
        """A curve over moments; a dashed one where it is a baseline."""
        index = thinned(values)
        where = self.axes.when(steps[index], times[index])
        trace: Trace = {
            "type": "scatter",
            "mode": "lines" if meaning == "baseline" and len(index) > 1 else "lines+markers",
            "name": label,
            "y": packed(values[index]),
            "meta": meaning,
            "line": {"width": 2, "dash": "dash" if meaning == "baseline" else "solid"},
            "marker": {"size": 6},
        }
        self._add(trace, where)

    def bars(self, label: str, index: np.ndarray, values: np.ndarray, meaning: str) -> None:
        """Bars at some of the steps."""
        trace = {"type": "bar", "name": label, "y": packed(values), "meta": meaning}
        self._add(trace, self.axes.at(index))

    def marks(
        self,
        label: str,
        moments: Sequence[tuple[int, float]],
        texts: Sequence[str],
        meaning: str,
        symbol: str,
    ) -> None:
        """Signs in the lane below the curves, at steps and times."""
        steps, times = _columns(moments)
        if not len(steps):
            return
        if len(steps) > MAX_MARKS:
            index = np.linspace(0, len(steps) - 1, MAX_MARKS).astype(int)
            label = f"{label} ({MAX_MARKS} of {len(steps):,})"
        else:
            index = np.arange(len(steps))
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": label,
            "y": packed(np.zeros(len(index))),
            "yaxis": "y2",
            "meta": meaning,
            "marker": {"size": 9, "symbol": symbol},
            "text": [texts[i] for i in index],
            "hovertemplate": "%{text}<extra></extra>",
        }
        self._add(trace, self.axes.when(steps[index], times[index]))

    def spots(
        self,
        label: str,
        steps: np.ndarray,
        times: np.ndarray,
        values: np.ndarray,
        texts: Sequence[str],
        meaning: str,
    ) -> None:
        """Rings around values of a curve."""
        trace = {
            "type": "scatter",
            "mode": "markers",
            "name": label,
            "y": packed(values),
            "meta": meaning,
            "marker": {"size": 11, "symbol": "circle-open"},
            "text": list(texts),
            "hovertemplate": "%{text}<extra></extra>",
        }
        self._add(trace, self.axes.when(steps, times))

    def verticals(self, moments: Sequence[tuple[int, float]], meaning: str) -> None:
        """Lines from top to bottom."""
        steps, times = (np.repeat(column, 3) for column in _columns(moments[:MAX_MARKS]))
        if not len(steps):
            return
        trace = {
            "type": "scatter",
            "mode": "lines",
            "y": packed(np.tile([0.0, 1.0, np.nan], len(steps) // 3)),
            "yaxis": "y3",
            "meta": meaning,
            "line": {"width": 1, "dash": "dot"},
            "opacity": 0.7,
            "hoverinfo": "skip",
            "showlegend": False,
        }
        self._add(trace, self.axes.when(steps, times))

    def figure(
        self,
        name: str,
        title: str,
        alt: str,
        unit: str,
        *,
        lane: bool = False,
        log_switch: bool = False,
        from_zero: bool = False,
    ) -> Figure:
        """The figure of what was gathered."""
        layout: dict[str, Any] = {
            "margin": {"l": 52, "r": 12, "t": 8, "b": 40},
            "hovermode": "x unified",
            "showlegend": len(self.data) > 1,
            "legend": {
                "orientation": "h",
                "y": 1.02,
                "yanchor": "bottom",
                "x": 0,
                "traceorder": "normal",
            },
            "xaxis": {"zeroline": False},
            "yaxis": {"title": {"text": unit}, "zeroline": False, "automargin": True},
        }
        if from_zero:
            layout["yaxis"]["rangemode"] = "tozero"
        if lane and any(trace.get("yaxis") == "y2" for trace in self.data):
            layout["yaxis"]["domain"] = [0.1, 1]
            layout["yaxis2"] = {
                "domain": [0, 0.07],
                "range": [-1, 1],
                "visible": False,
                "fixedrange": True,
            }
            layout["xaxis"]["anchor"] = "y2"
        if any(trace.get("yaxis") == "y3" for trace in self.data):
            layout["yaxis3"] = {
                "overlaying": "y",
                "range": [0, 1],
                "visible": False,
                "fixedrange": True,
            }
        return Figure(
            name=name,
            title=title,
            alt=alt,
            data=self.data,
            layout=layout,
            xs=self.xs,
            log_switch=log_switch,
        )


def _columns(moments: Sequence[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    steps = np.array([step for step, _ in moments], dtype=np.int64)
    return steps, np.array([t for _, t in moments], dtype=np.float64)
