"""Parts of an algorithm that workers need each other for, refused where each comes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import Violation
from ..feedback.kind import Turn
from ..legal import tag

if TYPE_CHECKING:
    from ..compose import DataParallel
    from .served_kind import ServedKind

_LATER = 1 << 40  # a step that no run comes to


def refused(sync: ServedKind, algorithm: DataParallel) -> Iterator[Violation]:
    """What of an algorithm needs workers that meet, and what of it this sync does not go with."""
    path, name = "data_parallel", type(sync).__name__
    parts = ("topology",) if sync.aggregates else ("topology", "aggregate")
    yield from _unusual(algorithm, parts, f"is of workers that meet; under {name} each comes alone")
    feedback = algorithm.feedback
    if not feedback.alone or feedback.sends_all(Turn(step=0, lr=1.0)):
        yield Violation(
            path=f"{path}.feedback.kind",
            value=tag(feedback),
            rule="works on what all workers sent together, and each push comes alone",
            legal='"None", "ErrorFeedback", "WorkerMomentum"',
        )
    for part in ("compress", "compress_back"):
        compress = getattr(algorithm, part)
        if compress.at(0) != compress.at(_LATER) or compress.apart != compress:
            yield Violation(
                path=f"{path}.{part}.kind",
                value=tag(compress),
                rule="needs all workers at the same step",
                legal='one that does not change with steps, such as "TopK", "QSGD"',
            )
    if sync.whole_answers:
        yield from _unusual(
            algorithm, ("compress_back",), f"is of parameters, and {name} {sync.whole_answers}"
        )
    yield from _unfit(sync, algorithm)


def _unfit(sync: ServedKind, algorithm: DataParallel) -> Iterator[Violation]:
    """Options of the sync itself, and its rule."""
    path, name, rule = "data_parallel.sync.servers", type(sync).__name__, algorithm.rule
    if sync.owns_momentum and (type(rule).__name__ != "SGD" or rule.keeps_momentum):
        yield Violation(
            path="data_parallel.rule.kind",
            value=tag(rule),
            rule=f"has its own step, and {name} is SGD with momentum",
            legal='"SGD" without momentum',
        )
    if sync.servers > 1 and sync.one_server:
        yield Violation(path=path, value=sync.servers, rule=sync.one_server, legal="1")
    at_server = not sync.steps_at_worker or (sync.settles and rule.settles)
    if sync.servers > 1 and at_server and not rule.by_piece:
        yield Violation(
            path=path,
            value=sync.servers,
            rule=f"splits vectors, and data_parallel.rule {type(rule).__name__} has norms",
            legal="1",
        )
    if sync.servers > 1 and sync.aggregates and not algorithm.aggregate.by_entry:
        aggregate = type(algorithm.aggregate).__name__
        yield Violation(
            path=path,
            value=sync.servers,
            rule=f"splits vectors, and data_parallel.aggregate {aggregate} looks at whole ones",
            legal="1",
        )
    if sync.ahead and sync.not_ahead:
        yield Violation(
            path="data_parallel.sync.ahead",
            value=sync.ahead,
            rule=f"leaves pushes unanswered, and {name} {sync.not_ahead}",
            legal="0",
        )


def undressed(name: str, why: str, algorithm: DataParallel) -> list[Violation]:
    """What there is of compression and feedback, of an algorithm whose sync goes with neither."""
    return [
        *_unusual(
            algorithm, ("compress", "feedback"), f"is of gradients on their way, and {name} {why}"
        )
    ]


def refused_with_models(name: str, algorithm: DataParallel) -> Iterator[Violation]:
    """What says how gradients travel, of an algorithm whose sync, of that name, sends models."""
    yield from _unusual(
        algorithm,
        ("topology", "aggregate"),
        f"is of workers that meet; under {name} models go from worker to worker",
    )
    yield from _unusual(
        algorithm,
        ("feedback", "compress"),
        f"is of gradients that travel; under {name} models do, as they are",
    )


def _unusual(algorithm: DataParallel, parts: tuple[str, ...], rule: str) -> Iterator[Violation]:
    """Parts that are not as they are unless given."""
    default = algorithm.__class__()
    for part in parts:
        given, usual = getattr(algorithm, part), getattr(default, part)
        if given != usual:
            yield Violation(
                path=f"data_parallel.{part}.kind",
                value=tag(given),
                rule=rule,
                legal=f'"{tag(usual)}"',
            )
