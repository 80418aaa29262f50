"""How far a run is, for people: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from ..units import show_bytes, show_seconds

_LINE_EVERY_S = 10.0
_WINDOW = 20  # steps over which rate and time left are taken
_BAR_EVERY_S = 0.1


class ProgressBar:
    """Told of every step (see `outcome.OnStep`); shows step, loss, rate, time left and memory.

    A context manager. On a terminal it draws a bar, elsewhere it prints a line every ten seconds
    and at the ends; `silent` does neither. With `tokens_per_sample` the rate counts tokens.
    """

    def __init__(
        self,
        *,
        silent: bool = False,
        tokens_per_sample: int | None = None,
        file: TextIO | None = None,
    ) -> None:
        self._per_sample = tokens_per_sample or 1
        self._unit = "tokens/s" if tokens_per_sample else "samples/s"
        self._silent = silent
        self._console = Console(file=file or sys.stderr, highlight=False)
        self._bar = _bar(self._console) if self._console.is_terminal and not silent else None
        self._task = self._bar.add_task("", total=None, text="starting") if self._bar else None
        self._rates: deque[float] = deque(maxlen=_WINDOW)
        self._ends_s: deque[float] = deque(maxlen=_WINDOW + 1)
        self._shown_s = -float("inf")

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(
        self,
        *,
        step: int,
        n_steps: int,
        loss: float | None,
        samples_per_s: float,
        memory_bytes: int,
    ) -> None:
        """`step` of `n_steps` is done; a skipped one has no loss."""
        now_s = time.monotonic()
        self._rates.append(samples_per_s * self._per_sample)
        self._ends_s.append(now_s)
        every_s = _LINE_EVERY_S if self._bar is None else _BAR_EVERY_S
        if self._silent or (step < n_steps and now_s - self._shown_s < every_s):
            return
        self._shown_s = now_s
        parts = [
            f"step {step}/{n_steps}",
            "skipped" if loss is None else f"loss {loss:.4g}",
            f"{_short(statistics.median(self._rates))} {self._unit}",
            *self._left(n_steps - step),
            show_bytes(memory_bytes),
        ]
        if self._bar is None or self._task is None:
            self._console.print("  ".join(parts), soft_wrap=True)
        else:
            self._bar.update(self._task, completed=step, total=n_steps, text="  ".join(parts))

    def _left(self, n_left: int) -> list[str]:
        """Time left at the pace of the last steps, evaluations and checkpoints among them."""
        if len(self._ends_s) < 2 or not n_left:
            return []
        pace_s = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return [f"{show_seconds(max(1, round(n_left * pace_s)))} left"]


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[text]}"),
        BarColumn(bar_width=None),
        console=console,
        expand=True,
        refresh_per_second=5,
    )


def _short(rate: float) -> str:
    """Three digits.

    >>> _short(12345.6), _short(0.25)
    ('12.3k', '0.25')
    """
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= 0.9995 * factor:
            return f"{rate / factor:.3g}{suffix}"
    return f"{rate:.3g}"
