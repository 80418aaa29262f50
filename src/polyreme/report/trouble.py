"""What went wrong in a run, and what it cost: faults, restarts, skipped steps, failed saves."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ..runlog import FaultEvent
from ..units import count
from .attempts import again_s, attempts, kept_skipped, led_to_end, restarts
from .ranks import aligned
from .runs import Run
from .spikes import Spike, spikes
from .words import number, percent, seconds

MAX_ROWS = 200  # of one table on the page
MAX_IDS = 32  # sample numbers of one spike
CHECKPOINT_HEADS = ("after", "checkpoint", "training stood still", "until it was complete", "")
TITLES = {
    "failed": "This run failed.",
    "done": "There was trouble on the way; the run came to its end.",
}
WORSE = 10.0  # times the first loss: a run that ends above that is said to have diverged
SAVE = "save"  # the operation of a fault in a checkpoint


def trouble(run: Run) -> dict[str, Any] | None:
    """The section "What went wrong"; None where nothing did.

    That a run which ended in order was gone on with is none: no step was taken back.
    """
    skipped, worse, again = skipped_line(run), worse_line(run), restarts(run)
    lost = not led_to_end(run).all()
    if not (run.faults or lost or skipped or worse or run.ranks or run.status == "failed"):
        return None
    return {
        "title": TITLES.get(run.status, "Something went wrong."),
        "lines": [line for line in (skipped, worse, restart_line(run)) if line],
        "faults": [
            {
                "when": f"{seconds(event.t)}, attempt {event.attempt}",
                "where": place(event),
                "what": event.what,
                "stack": event.stack,
            }
            for event in run.faults[-MAX_ROWS:]
        ],
        "n_hidden": max(0, len(run.faults) - MAX_ROWS),
        "restarts": [
            (
                str(each.attempt),
                seconds(each.t),
                f"step {each.step:,}" if each.step else "the start",
                str(each.devices),
                seconds(each.stopped_s),
            )
            for each in again[-MAX_ROWS:]
        ],
        "ranks": [aligned(last) for last in run.ranks],
    }


def place(event: FaultEvent) -> str:
    """Rank and operation of a fault, as far as they are known."""
    parts = [f"rank {event.rank}"] if event.rank is not None else []
    parts += [event.op] if event.op else []
    return ", ".join(parts)


def skipped_line(run: Run) -> str:
    """How many steps were skipped, and why most of them; empty where none was."""
    n_skipped = kept_skipped(run)
    if not n_skipped:
        return ""
    led = led_to_end(run)
    n_steps = max(e.step for e, kept in zip(run.steps, led, strict=True) if kept)
    kept = [e for e, kept in zip(run.steps, led, strict=True) if kept and e.skipped]
    reason, n_same = Counter(event.reason or "not finite" for event in kept).most_common(1)[0]
    why = f"because {reason}" if n_same == n_skipped else f"most because {reason}"
    line = f"{n_skipped:,} of {count(n_steps, 'step')} ({percent(n_skipped / n_steps)}) "
    line += f"{'was' if n_skipped == 1 else 'were'} skipped, {why}"
    blamed = {event.blamed for event in kept}
    often = Counter(rank for event in kept for rank in event.blamed).most_common(1)
    if often and len(blamed) == 1:
        line += f" on rank {', '.join(map(str, *blamed))}"
    elif often:
        line += f", on rank {often[0][0]} most often"
    line += "."
    if 2 * n_skipped > n_steps:
        line = f"Most of this run taught the model nothing: {line}"
    return line


def worse_line(run: Run) -> str:
    """That the last loss stands far above the first; empty where it does not."""
    led = led_to_end(run)
    kept = [e.loss for e, kept in zip(run.steps, led, strict=True) if kept and e.loss is not None]
    losses = [loss for loss in kept if math.isfinite(loss)]
    if not losses or not 0 < WORSE * losses[0] < losses[-1]:
        return ""
    return (
        f"The loss rose from {number(losses[0])} to {number(losses[-1])}: this run diverged. "
        "Try a smaller learning rate, or a longer warm-up."
    )


def restart_line(run: Run) -> str:
    """How often training began again and what that cost; empty where it did not."""
    again = restarts(run)
    if not again:
        return ""
    stopped_s, repeat_s = sum(each.stopped_s for each in again), again_s(run)
    times = "once" if len(again) == 1 else f"{len(again):,} times"
    return (
        f"Training began again {times} ({count(attempts(run), 'attempt')} in all): "
        f"{seconds(stopped_s)} passed until it went on, and {seconds(repeat_s)} went into steps "
        "done again."
    )


def spike_rows(found: tuple[Spike, ...]) -> list[tuple[str, ...]]:
    """Step, loss, what was usual, by how much it rose, and samples if they are logged."""
    return [
        (
            f"{each.step:,}",
            _steps(each),
            number(each.loss),
            number(each.usual),
            f"+{number(each.rise)}",
            _ids(each.sample_ids),
        )
        for each in found[:MAX_ROWS]
    ]


def run_spikes(run: Run) -> tuple[Spike, ...]:
    """Spikes on the way to the run's end."""
    led = led_to_end(run)
    return spikes([event for event, kept in zip(run.steps, led, strict=True) if kept])


def checkpoint_line(run: Run) -> str:
    """How many checkpoints there were, and how long training stood still for all of them."""
    failed = sum(event.op == SAVE for event in run.faults)
    still_s = sum(event.seconds for event in run.checkpoints)
    line = f"{count(len(run.checkpoints), 'checkpoint')}"
    line += f" and {count(failed, 'failed save')}" if failed else ""
    return f"{line}; training stood still for {seconds(still_s)} in all."


def checkpoint_rows(run: Run) -> list[tuple[str, ...]]:
    """Every checkpoint and every save that failed, in order of time."""
    rows = [
        (
            event.t,
            f"step {event.step:,}",
            seconds(event.seconds),
            "unknown" if event.write_s is None else seconds(event.write_s),
            "",
        )
        for event in run.checkpoints
    ]
    rows += [(event.t, "failed", "", "", event.what) for event in run.faults if event.op == SAVE]
    return [(seconds(row[0]), *row[1:]) for row in sorted(rows)[-MAX_ROWS:]]


def _steps(each: Spike) -> str:
    return f"{each.first:,}" if each.first == each.last else f"{each.first:,} to {each.last:,}"


def _ids(ids: tuple[int, ...] | None) -> str:
    if ids is None:
        return "not logged"
    shown = ", ".join(map(str, ids[:MAX_IDS]))
    return shown + (f" and {len(ids) - MAX_IDS:,} more" if len(ids) > MAX_IDS else "")
