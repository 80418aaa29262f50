"""How late gradients were, where workers do not wait for each other."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .attempts import led_to_end
from .figures import axes_of
from .plot import Figure, Plot
from .runs import Run
from .words import number

HEADS = ("worker", "gradients", "share", "mean delay", "19 of 20 at most", "longest")
_SHOWN = 32


def curve(run: Run) -> Figure | None:
    """Median and longest delay of each logged step."""
    kept = [at for at in np.flatnonzero(led_to_end(run)) if run.steps[at].delays]
    if not kept:
        return None
    found = [Counter(run.steps[at].delays) for at in kept]
    middle = np.array([_quantile(each, 0.5) for each in found], dtype=np.float64)
    most = np.array([max(each) for each in found], dtype=np.float64)
    plot, index = Plot(axes_of(run)), np.array(kept)
    plot.line("longest", most, "waiting", at=index)
    plot.line("median", middle, "compute", at=index)
    alt = f"median {number(float(np.median(middle)))}, longest {number(float(most.max()))}"
    return plot.figure(
        "delays", "Delay of gradients", alt, "gradients applied before", from_zero=True
    )


def line(run: Run) -> str:
    """All gradients in a sentence; empty where none was counted."""
    total = sum(_by_worker(run).values(), Counter[int]())
    if not total:
        return ""
    mean = sum(delay * count for delay, count in total.items()) / total.total()
    return (
        f"Between the parameters of a gradient and itself {number(mean)} others were applied in "
        f"the mean; half had at most {_quantile(total, 0.5)}, the longest delay was {max(total)}."
    )


def rows(run: Run) -> list[tuple[str, ...]]:
    """Of each worker its gradients and their delays; of many the latest and the least late."""
    found = _by_worker(run)
    whole = sum(each.total() for each in found.values())
    means = {w: sum(d * n for d, n in each.items()) / each.total() for w, each in found.items()}
    order = sorted(found)
    if len(order) > _SHOWN:
        late = sorted(order, key=lambda worker: -means[worker])
        order = [*late[: _SHOWN // 2], *late[-_SHOWN // 2 :]]
    return [
        (
            str(worker),
            str(found[worker].total()),
            f"{100 * found[worker].total() / whole:.3g} %",
            number(means[worker]),
            str(_quantile(found[worker], 0.95)),
            str(max(found[worker])),
        )
        for worker in order
    ]


def _by_worker(run: Run) -> dict[int, Counter[int]]:
    """Of all attempts together."""
    found: dict[int, Counter[int]] = {}
    for event in run.delays:
        for worker, delays in event.by_worker.items():
            found[worker] = found.get(worker, Counter()) + Counter(delays)
    return found


def _quantile(delays: Counter[int], share: float) -> int:
    """The least delay that so large a share of gradients does not exceed."""
    left = share * delays.total()
    for delay in sorted(delays):
        left -= delays[delay]
        if left <= 0:
            return delay
    return max(delays)
