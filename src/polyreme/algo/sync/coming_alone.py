"""Parts of an algorithm that workers need each other for, refused where each comes alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...errors import Violation
from ..feedback.kind import Turn

if TYPE_CHECKING:
    from ..compose import DataParallel

_LATER = 1 << 40  # a step that no run comes to


def refused(name: str, algorithm: DataParallel) -> Iterator[Violation]:
    """What says how workers meet, of an algorithm with the sync of that name."""
    path = "data_parallel"
    yield from _unusual(
        algorithm,
        ("topology", "aggregate"),
        f"is of workers that meet; under {name} each comes alone",
    )
    feedback, compress = algorithm.feedback, algorithm.compress
    if not feedback.alone or feedback.sends_all(Turn(step=0, lr=1.0)):
        yield Violation(
            path=f"{path}.feedback.kind",
            value=type(feedback).__name__,
            rule="works on what all workers sent together, and each push comes alone",
            legal='"NoFeedback", "ErrorFeedback", "WorkerMomentum"',
        )
    if compress.at(0) != compress.at(_LATER) or compress.apart != compress:
        yield Violation(
            path=f"{path}.compress.kind",
            value=type(compress).__name__,
            rule="needs all workers at the same step",
            legal='one that does not change with steps, such as "TopK", "QSGD"',
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
                value=type(given).__name__,
                rule=rule,
                legal=f'"{type(usual).__name__}"',
            )
