"""How good the partition of a linear model's rows was, in words."""

from __future__ import annotations

from ..runlog import Anchor
from ..units import count
from .runs import Run
from .words import number

_ALIKE, _APART = 1.2, 2.0  # what workers' own problems promise, over what there is
_PLACES = {0.0: "w = 0", 0.5: "half the final model"}


def worst(run: Run) -> Anchor | None:
    """The anchor that bounds the constant best, if a partition was measured."""
    found = None if run.summary is None else run.summary.partition
    return None if found is None else max(found.anchors, key=lambda each: each.constant)


def note(run: Run) -> str:
    """What the constant comes to, in a few words."""
    found = worst(run)
    if found is None:
        return ""
    promised = _promised(found)
    return f"or more, from {_place(found)}" + (f"; {promised}" if promised else "")


def line(run: Run) -> str:
    """What was measured and what it means; empty where nothing was."""
    found, summary = worst(run), run.summary
    if found is None or summary is None or summary.partition is None:
        return ""
    n = len(summary.partition.anchors)
    text = (
        f"Partition constant: at least {number(found.constant)}, the largest seen from "
        f"{count(n, 'anchor')} ({', '.join(map(_place, summary.partition.anchors))}). The optimum "
        "is taken to be the final model."
    )
    if found.promised is not None:
        text += (
            f" From {_place(found)} on, the problems that workers have for themselves fall at "
            f"least {_times(found.promised)} times as far as the objective can. "
        )
        if found.promised < _ALIKE:
            text += "Near 1, as here, workers' rows are alike."
        else:
            text += "The farther above 1, the less alike workers' rows are, and the more rounds "
            text += 'it takes; many rows dealt at random (data.partition = "iid") come near 1.'
    return text


def _promised(found: Anchor) -> str:
    if found.promised is None:
        return ""
    if found.promised < _ALIKE:
        return "workers' rows are alike"
    how = "" if found.promised < _APART else " much"
    far = f"{_times(found.promised)} times as far as all can"
    return f"workers' rows differ{how}: alone they would fall {far}"


def _times(promised: float) -> str:
    return f"{promised:.2f}" if promised < 10 else f"{promised:,.0f}"


def _place(anchor: Anchor) -> str:
    return _PLACES.get(anchor.at, f"{anchor.at:g} of the final model")
