"""UniAP's quadratic programme as it stands in the paper, linearised by flows, on several solvers.

Source: Lin et al., "UniAP", CVPR 2025, equations 1 to 10. Products of two choices become flows
along edges (exact: between two choices that are made the flow is 1).
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np

from .instance import Array, Assignment, Instance, Side
from .programme import SOLVERS, Programme, Terms

Cell = tuple[int, int]  # stage, strategy


class Written:
    """An instance as a programme."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        n_stages, n_layers = instance.n_stages, instance.n_layers
        self.choices: list[dict[Cell, int]] = [
            {
                (i, k): 0
                for i, k in itertools.product(range(n_stages), range(instance.n_strategies))
                if np.isfinite(instance.time[i, u, k])
                # A stage has a layer at least.
                and i <= u
                and n_stages - i <= n_layers - u
            }
            for u in range(n_layers)
        ]
        count = 0
        for cells in self.choices:
            for cell in cells:
                cells[cell] = count
                count += 1
        self.programme = Programme(n_choices=count, n=count)
        self._took: list[Terms] = [{} for _ in range(n_stages)]
        self._over: list[Terms] = [{} for _ in range(n_stages - 1)]
        self._write()

    def read(self, x: Array) -> Assignment:
        """The assignment that a solution stands for, and its objective."""
        stages, strategies = [], []
        for cells in self.choices:
            stage, strategy = max(cells, key=lambda cell: x[cells[cell]])
            stages.append(stage)
            strategies.append(strategy)
        value = self.instance.objective_s(stages, strategies)
        return Assignment(stages=tuple(stages), strategies=tuple(strategies), objective_s=value)

    def _write(self) -> None:
        instance, programme = self.instance, self.programme
        for layer, cells in enumerate(self.choices):
            programme.hold(dict.fromkeys(cells.values(), 1.0), 1.0, 1.0)
            for (stage, strategy), at in cells.items():
                self._took[stage][at] = float(instance.time[stage, layer, strategy])
        for layer in range(instance.n_layers - 1):
            self._neighbours(layer)
        for side in instance.sides:
            self._side(side)
        for stage, capacity in enumerate(instance.capacity):
            held = {
                at: float(instance.memory[stage, layer, strategy])
                for layer, cells in enumerate(self.choices)
                for (where, strategy), at in cells.items()
                if where == stage
            }
            programme.hold(held, high=float(capacity))
        longest = programme.longest = programme.variable()
        for terms in (*self._took, *self._over):
            programme.hold({at: -value for at, value in terms.items()} | {longest: 1.0}, low=0.0)
            for at, value in terms.items():
                programme.cost[at] = programme.cost.get(at, 0.0) + instance.alpha * value
        programme.cost[longest] = instance.beta

    def _neighbours(self, layer: int) -> None:
        """Flows from a layer's choices to the next one's."""
        instance = self.instance
        here, there = self.choices[layer], self.choices[layer + 1]
        out: dict[Cell, Terms] = {cell: {at: -1.0} for cell, at in here.items()}
        into: dict[Cell, Terms] = {cell: {at: -1.0} for cell, at in there.items()}
        for (i, k), (j, m) in itertools.product(here, there):
            if j - i not in (0, 1):
                continue
            cost = (instance.inside if i == j else instance.between)[layer, k, m]
            if not np.isfinite(cost):
                continue
            flow = self.programme.variable()
            out[i, k][flow] = into[j, m][flow] = 1.0
            (self._took if i == j else self._over)[i][flow] = float(cost)
        for terms in (*out.values(), *into.values()):
            self.programme.hold(terms, 0.0, 0.0)

    def _side(self, side: Side) -> None:
        source = self.choices[side.source]
        strategies = sorted({strategy for _, strategy in source})
        for target, cost in side.reads.items():
            out: dict[int, Terms] = {
                k: {at: -1.0 for (_, own), at in source.items() if own == k} for k in strategies
            }
            for (stage, m), at in self.choices[target].items():
                into: Terms = {at: -1.0}
                for k in strategies:
                    flow = self.programme.variable()
                    out[k][flow] = into[flow] = 1.0
                    self._took[stage][flow] = float(cost[k, m])
                self.programme.hold(into, 0.0, 0.0)
            for terms in out.values():
                self.programme.hold(terms, 0.0, 0.0)
        for border, k in itertools.product(range(self.instance.n_stages - 1), strategies):
            carried = self.programme.variable()
            terms = {carried: 1.0}
            terms |= {at: -1.0 for (i, own), at in source.items() if i <= border and own == k}
            terms |= {at: -1.0 for (i, _), at in self.choices[side.last].items() if i > border}
            self.programme.hold(terms, low=-1.0)
            self._over[border][carried] = float(side.border[k])


def miqp(
    instance: Instance,
    *,
    below: float = np.inf,
    deadline_s: float = 60.0,
    on: str = "highs",
) -> Assignment:
    """The optimum, of any number of tensors that pass layers by: UniAP's programme as written.

    `on` is one of `programme.SOLVERS`.

    Source: Lin et al., "UniAP", CVPR 2025, equations 1 to 10.
    """
    if instance.is_hopeless:
        return Assignment(bound_s=below, proved=True)
    end_s = time.monotonic() + deadline_s
    written = Written(instance)
    x, bound_s, proved = SOLVERS[on](written.programme, max(end_s - time.monotonic(), 1.0))
    if x is None:
        return Assignment(bound_s=min(bound_s, below), proved=proved)
    found = written.read(x)
    if found.objective_s >= below:
        return Assignment(bound_s=min(bound_s, below), proved=proved)
    return replace(found, bound_s=bound_s, proved=proved)
