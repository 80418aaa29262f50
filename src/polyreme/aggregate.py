"""Aggregators as plain functions of (n, d) tensors: ``pr.aggregate.krum(rows, byzantine=2)``.

One row a worker. Each function gives one vector of d entries, of the rows' type. Those that bear
hostile rows take how many there may be (`byzantine`), and what is done to the rows first
(`before`): ``before=(pr.aggregate.NearestNeighbourMixing(),)``. Too many for the rows given raise
ConfigError; rows that are not finite are set aside, and more of them than `byzantine` raise
RunError.

Rows may lie in a file that is mapped to memory (`torch.from_file`): a few blocks of entries at a
time are in use. `in_chunks` makes the aggregate of rows that come in chunks piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from .algo.aggregate import Aggregator
from .algo.aggregate.before import ARC as ARC
from .algo.aggregate.before import Before
from .algo.aggregate.before import Bucketing as Bucketing
from .algo.aggregate.before import Clipping as Clipping
from .algo.aggregate.before import NearestNeighbourMixing as NearestNeighbourMixing
from .algo.aggregate.blocks import Rows
from .algo.aggregate.bulyan import Bulyan
from .algo.aggregate.centered_clipping import CenteredClipping
from .algo.aggregate.chunks import Chunks
from .algo.aggregate.coordinate_median import CoordinateMedian
from .algo.aggregate.geometric_median import GeometricMedian
from .algo.aggregate.kind import AggregatorKind
from .algo.aggregate.krum import Krum
from .algo.aggregate.majority import MajorityVote
from .algo.aggregate.mean import Mean
from .algo.aggregate.mean_around_median import MeanAroundMedian
from .algo.aggregate.minimum_diameter import MinimumDiameterAveraging
from .algo.aggregate.monna import MoNNA
from .algo.aggregate.multi_krum import MultiKrum
from .algo.aggregate.robust import RobustKind
from .algo.aggregate.trimmed_mean import TrimmedMean
from .algo.effects import alone, settled
from .algo.legal import checked, no_member
from .errors import ConfigError, Violation, absent

if TYPE_CHECKING:
    import torch

    Neighbours = Literal["n-f-2", "n-f-1"]
    Befores = tuple[Before, ...]

_NAMES = (
    "ARC",
    "Bucketing",
    "Clipping",
    "NearestNeighbourMixing",
    "bulyan",
    "centered_clipping",
    "combined",
    "coordinate_median",
    "geometric_median",
    "in_chunks",
    "krum",
    "majority_vote",
    "mean",
    "mean_around_median",
    "minimum_diameter_averaging",
    "monna",
    "multi_krum",
    "trimmed_mean",
)


def __getattr__(name: str) -> object:
    raise absent(__name__, name, _NAMES)


def mean(rows: torch.Tensor) -> torch.Tensor:
    """The mean of all rows, summed in their order.

    >>> import torch
    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 6.0]])).tolist()
    [2.0, 4.0]
    """
    return combined(Mean(), rows)


def majority_vote(rows: torch.Tensor, byzantine: int = 0) -> torch.Tensor:
    """The sign that most rows have, entry by entry; 0 where as many are for plus as for minus.

    >>> import torch
    >>> majority_vote(torch.tensor([[1.0, 2.0], [3.0, -6.0], [0.5, 0.0]])).tolist()
    [1.0, 0.0]
    """
    return combined(MajorityVote(byzantine=byzantine), rows)


def krum(
    rows: torch.Tensor,
    byzantine: int,
    *,
    neighbours: Neighbours = "n-f-2",
    before: Befores = (),
) -> torch.Tensor:
    """The row whose n - f - 2 nearest others are nearest.

    >>> import torch
    >>> krum(torch.tensor([[1.0], [1.1], [1.2], [1.4], [9.0]]), byzantine=1).tolist()
    [1.100000023841858]
    """
    return combined(Krum(byzantine=byzantine, neighbours=neighbours, before=before), rows)


def multi_krum(
    rows: torch.Tensor,
    byzantine: int,
    *,
    neighbours: Neighbours = "n-f-2",
    chosen: int | None = None,
    before: Befores = (),
) -> torch.Tensor:
    """The mean of the n - f rows (or `chosen`) whose nearest others are nearest.

    >>> import torch
    >>> multi_krum(torch.tensor([[1.0], [2.0], [3.0], [4.0], [90.0]]), byzantine=1).tolist()
    [2.5]
    """
    kind = MultiKrum(byzantine=byzantine, neighbours=neighbours, chosen=chosen, before=before)
    return combined(kind, rows)


def coordinate_median(
    rows: torch.Tensor,
    byzantine: int,
    *,
    weights: Sequence[float] | None = None,
    before: Befores = (),
) -> torch.Tensor:
    """The median of each entry; the midpoint where n is even. `weights`: how much rows count.

    >>> import torch
    >>> coordinate_median(torch.tensor([[1.0], [9.0], [2.0], [3.0]]), byzantine=1).tolist()
    [2.5]
    """
    return combined(CoordinateMedian(byzantine=byzantine, before=before), rows, weights)


def trimmed_mean(rows: torch.Tensor, byzantine: int, *, before: Befores = ()) -> torch.Tensor:
    """The mean of each entry without its f smallest and its f largest values.

    >>> import torch
    >>> trimmed_mean(torch.tensor([[1.0], [9.0], [2.0], [4.0]]), byzantine=1).tolist()
    [3.0]
    """
    return combined(TrimmedMean(byzantine=byzantine, before=before), rows)


def mean_around_median(rows: torch.Tensor, byzantine: int, *, before: Befores = ()) -> torch.Tensor:
    """The mean of the n - f values of each entry that are nearest to its median.

    >>> import torch
    >>> mean_around_median(torch.tensor([[1.0], [9.0], [2.0], [3.0]]), byzantine=1).tolist()
    [2.0]
    """
    return combined(MeanAroundMedian(byzantine=byzantine, before=before), rows)


def geometric_median(
    rows: torch.Tensor,
    byzantine: int,
    *,
    nu: float = 1e-6,
    tolerance: float = 1e-9,
    iterations: int = 1000,
    weights: Sequence[float] | None = None,
    before: Befores = (),
) -> torch.Tensor:
    """The point with the smallest sum of distances to the rows. `weights`: how much rows count.

    >>> import torch
    >>> rows = torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 2.0], [2.0, 0.0]])
    >>> geometric_median(rows, byzantine=1).round(decimals=4).tolist()
    [1.0, 1.0]
    """
    kind = GeometricMedian(
        byzantine=byzantine, nu=nu, tolerance=tolerance, iterations=iterations, before=before
    )
    return combined(kind, rows, weights)


def centered_clipping(
    rows: torch.Tensor,
    byzantine: int,
    *,
    tau: float = 1.0,
    iterations: int = 1,
    centre: torch.Tensor | None = None,
    weights: Sequence[float] | None = None,
    before: Befores = (),
) -> torch.Tensor:
    """The centre (unset: 0), moved by the rows' mean difference to it, each clipped to `tau`.

    `weights`: how much rows count.

    >>> import torch
    >>> centered_clipping(torch.tensor([[0.5], [0.5], [90.0], [0.0]]), byzantine=1).tolist()
    [0.5]
    """
    kind = CenteredClipping(byzantine=byzantine, tau=tau, iterations=iterations, before=before)
    return combined(kind, rows, weights, centre)


def minimum_diameter_averaging(
    rows: torch.Tensor, byzantine: int, *, before: Befores = ()
) -> torch.Tensor:
    """The mean of the n - f rows whose largest distance from each other is smallest.

    >>> import torch
    >>> minimum_diameter_averaging(torch.tensor([[1.0], [5.0], [2.0]]), byzantine=1).tolist()
    [1.5]
    """
    return combined(MinimumDiameterAveraging(byzantine=byzantine, before=before), rows)


def monna(
    rows: torch.Tensor, byzantine: int, *, trusted: int = 0, before: Befores = ()
) -> torch.Tensor:
    """The mean of the n - f rows nearest to a trusted one, with itself.

    >>> import torch
    >>> monna(torch.tensor([[1.0], [5.0], [2.0]]), byzantine=1, trusted=2).tolist()
    [1.5]
    """
    return combined(MoNNA(byzantine=byzantine, trusted=trusted, before=before), rows)


def bulyan(rows: torch.Tensor, byzantine: int, *, before: Befores = ()) -> torch.Tensor:
    """Of n - 2 f rows that Krum takes one by one, the mean of n - 4 f values near the median.

    >>> import torch
    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0], [90.0]])
    >>> bulyan(rows, byzantine=1).tolist()
    [4.0]
    """
    return combined(Bulyan(byzantine=byzantine, before=before), rows)


def combined(
    aggregator: AggregatorKind,
    rows: torch.Tensor,
    weights: Sequence[float] | None = None,
    centre: torch.Tensor | None = None,
) -> torch.Tensor:
    """What any aggregator, one's own too, makes of rows when it has seen none before.

    What becomes of NaN and infinity is the aggregator's. Rows stay as they are. `weights` say how
    much each row counts, where the aggregator knows of that; `centre` is where one that keeps a
    centre starts.

    Raises:
        ConfigError: Rows are not (n, d) with n of at least 1, or the aggregator is not legal, or
            not for so many rows.
        RunError: More rows are not finite than the aggregator bears.
    """
    import torch

    _legal(aggregator)
    tensor = isinstance(rows, torch.Tensor)
    shape = tuple(rows.shape) if tensor else ()
    if len(shape) != 2 or not shape[0] or not rows.is_floating_point():
        value = f"{rows.dtype} of shape {shape}" if tensor else type(rows).__name__
        rule = "is not rows of real numbers"
        legal = "a tensor of shape (n, d), n >= 1, of floating point"
        raise ConfigError([Violation(path="rows", value=value, rule=rule, legal=legal)])
    found = aggregator.refused(len(rows))
    if weights is not None:
        found += _unlike(aggregator, weights, len(rows))
    if found:
        raise ConfigError(found)
    given = rows.detach()
    state = aggregator.init(given[0])
    if centre is not None:
        _check_centre(aggregator, centre, given)
        state = {**state, "centre": centre.detach().to(given)}
    if not isinstance(aggregator, RobustKind):
        out, _, _ = alone(settled(aggregator.combine(list(given), state)))
    else:
        out, _, _ = alone(aggregator.combine(given, state, weights))
    return out


def in_chunks(
    aggregator: RobustKind, chunks: Callable[[], Iterable[torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """The aggregate of rows too long for memory, piece by piece from its first entry on.

    `chunks` gives the rows' entries from the first to the last as tensors (n, k), and does so
    again each time that it is called: twice, or three times where rows are close to each other
    beside their norms. No more than one is held.

    >>> import torch
    >>> rows = torch.tensor([[1.0, 5.0], [2.0, 6.0], [9.0, 9.0]])
    >>> kind = CoordinateMedian(byzantine=1)
    >>> [piece.tolist() for piece in in_chunks(kind, lambda: rows.split(1, dim=1))]
    [[2.0], [6.0]]

    Raises:
        ConfigError: The aggregator is not legal, or not for so many rows; chunks do not fit
            together, or are others when they are asked for again.
        RunError: More rows are not finite than it bears.
    """
    _legal(aggregator)
    if not isinstance(aggregator, RobustKind):
        kinds = [kind for kind in get_args(Aggregator) if issubclass(kind, RobustKind)]
        raise no_member("aggregator", aggregator, kinds)
    given = Rows.of(Chunks(chunks))
    found = aggregator.refused(given.n)
    if found:
        raise ConfigError(found)
    state = {**aggregator.init(given.like[:0])}
    state.pop("centre", None)  # the origin
    made, _ = alone(aggregator.prepared(given, state))
    for _, _, piece, _ in aggregator.pieces(given, made, None):
        yield piece


def _legal(aggregator: AggregatorKind) -> None:
    if not isinstance(aggregator, AggregatorKind):
        raise no_member("aggregator", aggregator, get_args(Aggregator))
    before = getattr(aggregator, "before", ())
    kinds = get_args(Before)
    if not isinstance(before, tuple) or not all(isinstance(each, kinds) for each in before):
        rule = "is no tuple of what is done to rows first"
        legal = ", ".join(f"({kind.__name__}(...),)" for kind in kinds)
        raise ConfigError([Violation(path="before", value=repr(before), rule=rule, legal=legal)])
    for each in before:
        checked(each, f"before.{type(each).__name__}")
    checked(aggregator, type(aggregator).__name__)


def _check_centre(aggregator: AggregatorKind, centre: torch.Tensor, rows: torch.Tensor) -> None:
    """Raises ConfigError unless the aggregator keeps a centre, and this can be one."""
    import torch

    kept = isinstance(aggregator, RobustKind) and aggregator.centred
    d = rows.shape[1]
    rule, legal = "", f"a tensor of shape ({d},), finite"
    if not kept:
        rule, legal = f"is nothing that {type(aggregator).__name__} keeps", "leave it out"
    elif not isinstance(centre, torch.Tensor) or centre.shape != (d,):
        rule = "is not of the rows' width"
    elif not centre.isfinite().all():
        rule = "is not finite"
    if rule:
        shown = str(tuple(getattr(centre, "shape", ()))) or repr(centre)
        raise ConfigError([Violation(path="centre", value=shown, rule=rule, legal=legal)])


def _unlike(aggregator: AggregatorKind, weights: Sequence[float], n: int) -> list[Violation]:
    rule, legal = "", ""
    if not aggregator.takes_weights:
        rule = f"are not defined for {type(aggregator).__name__}"
        legal = "leave them out"
    elif len(weights) != n:
        rule, legal = f"are not one of each of {n} rows", f"{n} numbers >= 0, not all 0"
    if not rule:
        return []
    return [Violation(path="weights", value=list(weights), rule=rule, legal=legal)]
