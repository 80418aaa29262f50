"""A solver for windows that repeat, with what comes before and after them, and for no windows.

Source: Lin et al., Tessel, HPCA 2024, section 4. Differs: warm-up and cool-down are solved with the
windows, as any one of equally good windows may suit them badly; constraints go to CP-SAT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import msgspec

from ..ir import ActionKind
from .repetend import KINDS, Block, Lane, Repetend, Work, needs

LATER: tuple[ActionKind, ...] = ("I", "W")
SEED = 1


def shortest(work: Work, cap: int) -> Repetend | None:
    """The windows of the least period, of those over the fewest microbatches, at most `cap`.

    A rank holds as many microbatches as take part. None if the solver gave up.
    """
    bound = max(work.busy)
    for span in range(1, cap + 1):
        found = _Windows(work, span, bound).solved()
        if found is not None:
            return found
    low, high = bound, work.bound(1) + sum(work.busy)
    best = _Windows(work, cap, high).solved()
    while best is not None and low + 1 < high:
        period = (low + high) // 2
        found = _Windows(work, cap, period).solved()
        if found is None:
            low = period
        else:
            best, high = found, period
    return best


def ended(work: Work, span: int, period: int, effort: float) -> Repetend | None:
    """Windows of that period with the shortest warm-up and cool-down; None where none was found.

    `effort` bounds the solver's work, in its deterministic seconds. It first tries the lags of
    1F1B, W as late as may be (which is ZB-H1), and goes on from what that gives.
    """
    p = work.n_ranks
    inputs: dict[Lane, int] = {("I", stage): min(p - 1 - stage, span - 1) for stage in range(p)}
    weights: dict[Lane, int] = {("W", stage): span - 1 for stage in range(p)}
    best: Repetend | None = None
    hint: Sequence[int] = ()
    for share, lags in ((0.2, inputs | weights), (0.2, inputs), (0.6, {})):
        model = _Ended(work, span, period)
        model.fix(lags)
        found = model.solved(effort * share, hint)
        if found is not None and (best is None or found.units < best.units):
            best, hint = found, model.values
        if best is not None and best.units == model.bound:
            break
    return best


def whole(work: Work, n_microbatches: int, cap: int, effort: float) -> list[list[Block]] | None:
    """Blocks of each rank in turn, without windows: for few microbatches."""
    model = _Model(work)
    far = sum(work.busy) * n_microbatches + work.bound(1)
    start: dict[Block, Any] = {}
    ends = model.number(work.bound(n_microbatches), far)
    for stage, kind, microbatch in product(range(work.n_ranks), KINDS, range(n_microbatches)):
        block, units = Block(kind, stage, microbatch), work.of((kind, stage))
        start[block] = model.number(work.heads[stage], far)
        model.cp.add(start[block] + units <= ends)
        if microbatch:
            model.cp.add(start[block] >= start[Block(kind, stage, microbatch - 1)] + units)
    for block, value in start.items():
        for earlier, gap in needs(work, block):
            model.cp.add(value >= start[earlier] + work.of(earlier[:2]) + gap)
        if block.kind == "F" and block.microbatch >= cap:
            freed = Block("W", block.stage, block.microbatch - cap)
            model.cp.add(value >= start[freed] + work.of(freed[:2]))
    for stage in range(work.n_ranks):
        own = [block for block in start if block.stage == stage]
        model.alone([(start[block], work.of(block[:2]), None) for block in own])
    model.cp.minimize(ends)
    if not model.run(effort):
        return None
    found: list[list[Block]] = [[] for _ in range(work.n_ranks)]
    for block in sorted(start, key=lambda block: model.value(start[block])):
        found[block.stage].append(block)
    return found


class _Model:
    """A constraint model whose answer is the same every time: effort is counted, not timed."""

    def __init__(self, work: Work) -> None:
        from ortools.sat.python import cp_model

        self.work, self.cp = work, cp_model.CpModel()
        self._solver = cp_model.CpSolver()
        self._good = (cp_model.OPTIMAL, cp_model.FEASIBLE)
        self._variables: list[Any] = []

    def number(self, low: int, high: int) -> Any:
        """A new variable."""
        self._variables.append(self.cp.new_int_var(low, high, ""))
        return self._variables[-1]

    def truth(self) -> Any:
        """A new variable that is true or false."""
        self._variables.append(self.cp.new_bool_var(""))
        return self._variables[-1]

    def alone(self, blocks: Sequence[tuple[Any, int, Any]]) -> None:
        """One at a time of (start, units, whether it is there; None: it is)."""
        self.cp.add_no_overlap(
            [
                self.cp.new_fixed_size_interval_var(start, units, "")
                if there is None
                else self.cp.new_optional_fixed_size_interval_var(start, units, there, "")
                for start, units, there in blocks
            ]
        )

    def run(self, effort: float, hint: Sequence[int] = ()) -> bool:
        """Whether there is an answer; `hint` holds `values` of another one."""
        for variable, value in zip(self._variables, hint, strict=False):
            self.cp.add_hint(variable, value)
        self._solver.parameters.num_workers = 1
        self._solver.parameters.random_seed = SEED
        self._solver.parameters.max_deterministic_time = effort
        return self._solver.solve(self.cp) in self._good

    def value(self, variable: Any) -> int:
        """In the answer."""
        return int(self._solver.value(variable))

    @property
    def values(self) -> list[int]:
        """All of the answer."""
        return [self.value(each) for each in self._variables]


class _Windows(_Model):
    """When blocks of windows that are a period apart start, and by how many windows they lag."""

    effort = 1.0  # far more than it takes

    def __init__(self, work: Work, span: int, period: int) -> None:
        super().__init__(work)
        self.span, self.period = span, period
        self.far = period * (3 * span + 3) + 2 * work.bound(1)
        self.opens = [self.number(0, self.far if stage else 0) for stage in range(work.n_ranks)]
        self.at: dict[Lane, Any] = {}  # from the start of the rank's window
        self.lag: dict[Lane, Any] = {}
        for stage in range(work.n_ranks):
            self._window(stage)
        for stage in range(work.n_ranks - 1):
            for earlier, later in ((stage, stage + 1), (stage + 1, stage)):
                kind: ActionKind = "F" if earlier < later else "I"
                end = self.flat((kind, earlier)) + work.of((kind, earlier)) + work.send
                self.cp.add(end <= self.flat((kind, later)))
            self.cp.add(self.lag["I", stage] >= self.lag["I", stage + 1])

    def _window(self, stage: int) -> None:
        forward = self.work.forward[stage]
        self.at["F", stage] = self.lag["F", stage] = 0
        for kind in LATER:
            last = max(self.period - self.work.of((kind, stage)), forward)
            self.at[kind, stage] = self.number(forward, last)
            self.lag[kind, stage] = self.number(0, self.span - 1)
        turned = self.truth()  # W before I, of an earlier microbatch
        inputs, weights = self.at["I", stage], self.at["W", stage]
        self.cp.add(inputs + self.work.inputs[stage] <= weights).only_enforce_if(~turned)
        self.cp.add(weights + self.work.weights[stage] <= inputs).only_enforce_if(turned)
        self.cp.add(self.lag["W", stage] >= self.lag["I", stage] + turned)

    def flat(self, lane: Lane) -> Any:
        """When a block of the microbatch of window 0 starts."""
        return self.opens[lane[1]] + self.at[lane] + self.period * self.lag[lane]

    def fix(self, lags: Mapping[Lane, int]) -> None:
        """Some lags are given."""
        for lane, lag in lags.items():
            self.cp.add(self.lag[lane] == lag)

    def solved(self, effort: float = effort, hint: Sequence[int] = ()) -> Repetend | None:
        """The windows; None where there are none or none was found."""
        if self.period < max(self.work.busy) or not self.run(effort, hint):
            return None
        return Repetend(
            span=self.span,
            period=self.period,
            starts={
                lane: self.value(self.opens[lane[1]]) + self.value(at)
                for lane, at in self.at.items()
            },
            lags={lane: self.value(lag) for lane, lag in self.lag.items()},
        )


class _Ended(_Windows):
    """Windows, and what comes before and after them if there is one of each rank.

    The lag says which blocks are of the warm-up and which of the cool-down; `_late[lane][n]` says
    that it is at least n. Times of the warm-up are from its start, others from the first window's.
    """

    def __init__(self, work: Work, span: int, period: int) -> None:
        super().__init__(work, span, period)
        self.bound = max(
            head + span * busy for head, busy in zip(work.heads, work.busy, strict=True)
        )
        self._first, self._last = self.number(0, self.far), self.number(0, self.far)
        self._late: dict[Lane, list[Any]] = {}
        self._before: dict[Block, Any] = {}
        self._after: dict[Block, Any] = {}
        for lane in product(LATER, range(work.n_ranks)):
            self._late[lane] = [self.truth() for _ in range(span)]
            for least, late in enumerate(self._late[lane]):
                self.cp.add(self.lag[lane] >= least).only_enforce_if(late)
                self.cp.add(self.lag[lane] < least).only_enforce_if(~late)
        for stage in range(work.n_ranks):
            self._warm_up(stage)
            self._cool_down(stage)
            self._room(stage)
        for stage in range(work.n_ranks - 1):
            self._ways_back(stage)
        self.cp.add(self._first + self._last >= self.bound)
        self.cp.minimize(self._first + self._last)

    def solved(self, effort: float = _Windows.effort, hint: Sequence[int] = ()) -> Repetend | None:
        """The windows with both ends."""
        found = super().solved(effort, hint)
        if found is None:
            return None
        n, lags = self.span, found.lags
        before = [each for each in self._before if each.microbatch < n - 1 - lags[each[:2]]]
        after = [each for each in self._after if each.microbatch >= n - lags[each[:2]]]
        return msgspec.structs.replace(
            found,
            before=tuple(sorted(before, key=lambda block: self.value(self._before[block]))),
            after=tuple(sorted(after, key=lambda block: self.value(self._after[block]))),
            units=self.value(self._first) + self.value(self._last),
        )

    def _end(self, lane: Lane) -> Any:
        """Of a block of the first window."""
        return self.opens[lane[1]] + self.at[lane] + self.work.of(lane)

    def _warm_up(self, stage: int) -> None:
        """All F but the newest; I and W whose lag is small enough."""
        own: list[tuple[Any, int, Any]] = []
        for kind, microbatch in product(KINDS, range(self.span - 1)):
            block, units = Block(kind, stage, microbatch), self.work.of((kind, stage))
            start = self._before[block] = self.number(self.work.heads[stage], self.far)
            there = None if kind == "F" else ~self._late[kind, stage][self.span - 1 - microbatch]
            own.append((start, units, there))
            self._if(there, start + units <= self._first + self.opens[stage])
            if microbatch:
                earlier = self._before[block._replace(microbatch=microbatch - 1)]
                self.cp.add(start >= earlier + units)
            for needed, gap in needs(self.work, block):
                if needed.stage <= stage:
                    end = self._before[needed] + self.work.of(needed[:2]) + gap
                    self._if(there, start >= end)
        self.alone(own)

    def _cool_down(self, stage: int) -> None:
        """I and W whose lag is large enough."""
        own: list[tuple[Any, int, Any]] = []
        for kind, behind in product(LATER, range(self.span - 1)):
            block = Block(kind, stage, self.span - 1 - behind)
            units, there = self.work.of((kind, stage)), self._late[kind, stage][behind + 1]
            start = self._after[block] = self.number(0, self.far)
            own.append((start, units, there))
            self._if(there, start + units <= self._last)
            for each in KINDS:
                self._if(there, start >= self._end((each, stage)))
            if behind:
                later = self._after[block._replace(microbatch=block.microbatch + 1)]
                self.cp.add(start + units <= later)
            if kind == "W":
                inputs = self._after[block._replace(kind="I")] + self.work.inputs[stage]
                self._if((there, self._late["I", stage][behind + 1]), start >= inputs)
        for each in KINDS:
            self.cp.add(self._last >= self._end((each, stage)))
        self.alone(own)

    def _room(self, stage: int) -> None:
        """A rank has time for all that it plays; implied, but the solver finds more by it."""
        work, newest = self.work, self.span - 1
        done = sum(work.of((kind, stage)) * (newest - self.lag[kind, stage]) for kind in KINDS)
        left = sum(work.of((kind, stage)) * self.lag[kind, stage] for kind in LATER)
        self.cp.add(self._first + self.opens[stage] >= work.heads[stage] + done)
        self.cp.add(self._last >= self.opens[stage] + work.busy[stage] + left)

    def _ways_back(self, stage: int) -> None:
        """I comes after that of the next stage, be either in a window, before or after."""
        here, there = self._late["I", stage], self._late["I", stage + 1]
        units, newest = self.work.inputs[stage + 1] + self.work.send, self.span - 1
        for behind in range(1, newest + 1):
            block = Block("I", stage, newest - behind)
            later, end = self._before[block], self._before[block._replace(stage=stage + 1)] + units
            start = self._first + self.flat(("I", stage)) - self.period * behind
            self._if(~here[behind], later >= end)
            self._if((here[behind], ~there[behind]), start >= end)
        for behind in range(newest):
            block = Block("I", stage, newest - behind)
            later, end = self._after[block], self._after[block._replace(stage=stage + 1)] + units
            in_window = self.flat(("I", stage + 1)) - self.period * behind + units
            self._if(there[behind + 1], later >= end)
            self._if((here[behind + 1], ~there[behind + 1]), later >= in_window)

    def _if(self, there: Any, rule: Any) -> None:
        """A rule for blocks that are there (None: they are)."""
        added = self.cp.add(rule)
        if there is not None:
            added.only_enforce_if(there)
