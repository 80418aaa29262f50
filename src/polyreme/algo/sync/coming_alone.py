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
    path, default = "data_parallel", algorithm.__class__()
    for part in ("topology", "aggregate"):
        given, usual = getattr(algorithm, part), getattr(default, part)
        if given != usual:
            yield Violation(
                path=f"{path}.{part}.kind",
                value=type(given).__name__,
                rule=f"is of workers that meet; under {name} each comes alone",
                legal=f'"{type(usual).__name__}"',
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
