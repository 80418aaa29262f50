"""What every robust aggregator has: rows of any content may be among those that it is given."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from ...errors import ConfigError, RunError, Violation, undefined
from ..effects import Split, SumShards
from ..legal import tag
from .before import Before
from .blocks import Rows, on_host, working
from .kind import AggregatorKind, Combined, State
from .ordered import Order, finite_rows, squared_from

if TYPE_CHECKING:
    import torch

    from .geometry import Array, Points


@dataclass(frozen=True, kw_only=True)
class Made:
    """How the aggregate of some rows is made, block by block.

    `kept` are the rows that it is made of, `f` how many of them may be hostile, `weights` how much
    each counts (None: alike), `mixing` (m, n + 1) the sums of them and of the centre that the
    entries are made of (None: the rows themselves), `squared` the rows' squared distances from the
    aggregate, where they are known before it is made.
    """

    kept: list[int]
    f: int
    weights: Array | None = None
    mixing: Array | None = None
    squared: Array | None = None


class Broken(RunError):
    """More rows are gone than an aggregate bears; `rows` are those that are not finite."""

    rows: tuple[int, ...] = ()


class RobustKind(AggregatorKind, frozen=True, kw_only=True):
    """An aggregator whose result stays with the honest rows whatever the others hold.

    Rows that are not finite are set aside first: each was one of the f. What is left is mixed by
    what comes `before`, in its order. Ties go to the row of the lowest index.

    Attributes:
        byzantine: Rows that may be hostile or broken (f).
        before: What is done to the rows first.
    """

    byzantine: Annotated[int, msgspec.Meta(ge=0)] = 1
    before: tuple[Before, ...] = ()

    robust: ClassVar[bool] = True
    geometric: ClassVar[bool] = True
    """Whether distances between rows decide."""
    centred: ClassVar[bool] = False
    """Whether the last aggregate is one more row."""

    @property
    def by_entry(self) -> bool:
        """Whether each entry depends on the same entry of the rows alone; of finite rows."""
        return not (self.geometric or self.before)

    @property
    def bears(self) -> int:
        """As many as may be hostile."""
        return self.byzantine

    least_rule: ClassVar[str] = "n >= 2 f + 1"
    """How many rows it takes, as a formula."""

    exact: ClassVar[bool] = False
    """Whether some rows reach `epsilon`."""
    epsilon_source: ClassVar[str] = "the mean of k of n rows has no more than (n - k) / k"
    """Why `epsilon` is what it is."""
    time: ClassVar[str] = "n^2 d"
    memory: ClassVar[str] = "n^2 + blocks"
    assumes: ClassVar[str] = "at most f hostile rows"
    """What it rests on."""

    def epsilon(self, n: int) -> float:
        """The price of robustness: what ||A(x) - mean||^2 is at most, without attack.

        As a multiple of the rows' mean squared distance from their mean.
        """
        raise undefined(self, "epsilon")

    def least(self, f: int) -> int:
        """That, as a number."""
        return 2 * f + 1

    def too_many(self, n: int, f: int) -> str | None:
        """The rule that n rows of which f are hostile break, before anything is mixed."""
        for each in self.before:
            if f >= n:
                return f"data_parallel.aggregate.before {tag(each)} takes n >= f + 1 rows"
            n = each.rows(n)
        if n < self.least(f):
            made = " rows after those before it" if self.before else " rows"
            return (
                f"{tag(self)} takes {self.least_rule}{made}: {self.least(f)} for f = {f}, not {n}"
            )
        return None

    def refused(self, n: int) -> list[Violation]:
        """So many hostile rows are too many of n."""
        broken = self.too_many(n, self.byzantine)
        if broken is None:
            return []
        most = self.most(n)
        legal = f"{most} (or less, of {n} rows)" if most else f"0 (of {n} rows)"
        if most is None:
            legal = f"more rows than {n}"
        return [
            Violation(
                path="data_parallel.aggregate.byzantine",
                value=self.byzantine,
                rule=f"is too large: {broken}",
                legal=legal,
            )
        ]

    def most(self, n: int) -> int | None:
        """The largest f that is legal with n rows; None: not even 0 is."""
        least_broken = bisect_left(range(n), True, key=lambda f: self.too_many(n, f) is not None)
        return least_broken - 1 if least_broken else None

    def init(self, like: torch.Tensor) -> State:
        """Where what comes before stands, and the first centre, which is 0."""
        state: State = {}
        if self.before:
            state["before"] = {str(at): each.init() for at, each in enumerate(self.before)}
        if self.centred:
            state["centre"] = like.new_zeros(like.shape)
        return state

    def mixing(self, points: Points, f: int, weights: Array | None) -> Array:
        """Weights (m, n + 2) of rows, centre and origin: the sums that the entries are made of."""
        raise undefined(self, "mixing")

    def order(self, n: int, f: int) -> Order | None:
        """How entries are made of n rows, or sums of rows, that count alike; None: as `entries`."""
        return None

    def entries(self, block: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """The aggregate's entries (k,) from those of the rows, or of their sums, (m, k)."""
        return block[0]

    def combine(
        self,
        rows: torch.Tensor | Sequence[torch.Tensor],
        state: State,
        weights: Sequence[float] | None = None,
        absent: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> Split[Combined]:
        """The aggregate of rows, the next state, and the suspects among the rows.

        Suspects are the rows set aside, and of the others those farthest from the aggregate, to f
        in all with the absent. `weights` say how much each row counts, `absent` how many rows are
        missing, which count as hostile, `numbers` whose each row is (unset: from 0 on).

        Raises:
            ConfigError: Rows are to count unlike, and here they cannot.
            Broken: Too few finite rows are left.
        """
        import torch

        given = Rows.of(rows)
        after, all_finite = state, False
        if self.by_entry:
            # Rows are mostly finite: whether they are is found out on the way.
            made, all_finite = self._of_entries(range(given.n), given.n, weights, absent), True
        else:
            made, after = yield from self.prepared(given, state, weights, absent, numbers)
        while True:
            out = torch.empty_like(given.like)
            told = torch.zeros(2, len(made.kept), dtype=torch.float64, device=out.device)
            for start, block, piece, seen in self.pieces(given, made, state.get("centre")):
                out[start : start + len(piece)] = piece
                if seen is not None:
                    told += seen
                    continue
                if all_finite:
                    told[0] += ~finite_rows(block)
                if made.squared is None:
                    told[1] += squared_from(block, piece)
            squared = made.squared
            if squared is None:
                told = yield SumShards(partial=told)
                squared = told[1].cpu().numpy()
            if not all_finite or not told[0].any():
                break
            kept = [i for i in made.kept if not told[0, i]]
            made, all_finite = self._of_entries(kept, given.n, weights, absent), False
        if self.centred:
            after = {**after, "centre": out}
        return out, after, self._suspects(given.n, made, squared)

    def prepared(
        self,
        given: Rows,
        state: State,
        weights: Sequence[float] | None = None,
        absent: int = 0,
        numbers: Sequence[int] | None = None,
    ) -> Split[tuple[Made, State]]:
        """How the aggregate is made of the rows, and the next state but for the centre."""
        import numpy as np
        import torch

        from .geometry import measured, then

        if self.by_entry:
            bad = torch.zeros(given.n, device=given.like.device)
            for _, block in given.blocks():
                bad += ~finite_rows(block)
            bad = yield SumShards(partial=bad)
            kept = [i for i in range(given.n) if not bad[i]]
            return self._of_entries(kept, given.n, weights, absent), state
        points, kept = yield from measured(given, state.get("centre"))
        if numbers is not None:
            points = replace(points, numbers=tuple(numbers[i] for i in kept))
        f = self._left(given.n, kept, absent)
        counted = self._weighed(weights, kept)
        mixed, whole = points, np.eye(points.n, points.n + 2)
        before: State = {}
        for at, each in enumerate(self.before):
            step, before[str(at)] = each.mixing(mixed, f, state["before"][str(at)])
            mixed, whole = mixed.mixed(step), then(whole, step)
        squared = None
        if self.geometric:
            step = self.mixing(mixed, f, counted)
            whole = then(whole, step)
        if len(whole) == 1:
            squared = points.squared_from(whole[0])
        made = Made(kept=kept, f=f, weights=counted, mixing=whole[:, :-1], squared=squared)
        return made, {**state, "before": before} if before else state

    def pieces(
        self, given: Rows, made: Made, centre: torch.Tensor | None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Of each block where it starts, the rows that it is made of, and the aggregate's.

        Last is what was seen of each row on the way, if that is so: (2, n), whether it is not
        finite, and its squared distance from the aggregate.
        """
        import numpy as np
        import torch

        like = given.like
        dtype, device = working(like.dtype), like.device
        rows, mixing = given.taken(made.kept), made.mixing
        if mixing is not None and made.squared is not None:
            used = np.flatnonzero(mixing[:, :-1].any(0))
            if len(used) <= rows.n // 2:  # else to leave some out costs more than it saves
                rows, mixing = rows.taken(used.tolist()), mixing[:, [*used, -1]]
        weights = None
        if made.weights is not None:
            weights = torch.as_tensor(made.weights, device=device)
        as_they_are = mixing is None or np.array_equal(mixing, np.eye(rows.n, rows.n + 1))
        by = None if mixing is None else torch.as_tensor(mixing, dtype=dtype, device=device)
        m = rows.n if by is None or as_they_are else len(by)
        picked = None if by is None or as_they_are or m == 1 else _picked(by)
        order = None if weights is not None else self.order(m, made.f)
        at_once = m == 1 and not on_host(like)
        if order is not None and as_they_are:
            at_once = order.compiled(m, like) is not None
        for start, block in rows.blocks(at_once=at_once and dtype == like.dtype):
            mixed = block.to(dtype)
            if picked is not None:
                mixed = mixed[picked]
            elif by is not None and not as_they_are:
                mixed = by[:, :-1] @ mixed
                if centre is not None:
                    mixed += by[:, -1:] * centre[start : start + block.shape[1]].to(dtype)
            compiled = None if order is None else order.compiled(m, mixed[0])
            seen = None
            if order is None:
                piece = self.entries(mixed, weights)
            elif compiled is not None:
                piece, seen = compiled(mixed, order)
            else:
                piece = order.of(mixed)
            yield start, block, piece.to(block.dtype), seen if as_they_are else None

    def _of_entries(
        self, kept: Sequence[int], n: int, weights: Sequence[float] | None, absent: int
    ) -> Made:
        """Where entries are made of the rows themselves."""
        f = self._left(n, kept, absent)
        return Made(kept=list(kept), f=f, weights=self._weighed(weights, kept))

    def _weighed(self, weights: Sequence[float] | None, kept: Sequence[int]) -> Array | None:
        """Weights of the rows kept, in the mean 1."""
        if weights is None:
            return None
        import numpy as np

        name = tag(self)
        found = np.asarray(weights, dtype=np.float64)
        if not self.takes_weights:
            rule, legal = f"are not defined for {name}", "None"
        elif self.before:
            rule, legal = f"are not defined for {name} with anything before it", "None"
        elif not (found.min() >= 0 and 0 < found[list(kept)].sum() < np.inf):
            rule, legal = "are not how much rows count", "numbers >= 0, not all of them 0"
        else:
            of_kept: Array = found[list(kept)]
            return of_kept
        raise ConfigError([Violation(path="weights", value=list(weights), rule=rule, legal=legal)])

    def _left(self, n: int, kept: Sequence[int], absent: int) -> int:
        """How many of the rows left may be hostile: each that is gone counts as one that was.

        Raises:
            Broken: More are gone than may be hostile, or too few are left.
        """
        gone = absent + n - len(kept)
        left = self.byzantine - gone
        broken = self.too_many(len(kept), left) if left >= 0 else None
        if left >= 0 and broken is None:
            return left
        said = f"{gone} of {n + absent} rows are missing or not finite"
        told = f", and {tag(self)} was told of at most {self.byzantine} that may be hostile"
        error = Broken(f"{said}{told if broken is None else f': {broken}'}")
        error.rows = tuple(sorted(set(range(n)) - set(kept)))
        raise error

    def _suspects(self, n: int, made: Made, squared: Array) -> tuple[int, ...]:
        """Rows set aside, and those farthest from the aggregate, to f in all.

        No row is one that is no farther than half of them: of rows alike there is none.
        """
        import numpy as np

        aside = set(range(n)) - set(made.kept)
        by_distance = sorted(range(len(made.kept)), key=lambda place: (-squared[place], place))
        usual = (1 + 1e-9) * np.median(squared)
        far = [made.kept[place] for place in by_distance if squared[place] > usual]
        return tuple(sorted(aside | set(far[: made.f])))


def _picked(by: torch.Tensor) -> torch.Tensor | None:
    """Which rows sums of rows and centre are, if each is one row."""
    alone = (by != 0).sum(1) == 1
    one = by[:, :-1] == 1
    return one.int().argmax(1) if bool((alone & one.any(1)).all()) else None
