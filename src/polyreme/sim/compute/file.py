"""Seconds from a file."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import ConfigError, Violation
from .kind import ComputeKind

_FORM = "a text file with a line of positive numbers (seconds) for each worker"


class File(ComputeKind, frozen=True, kw_only=True, tag="file", tag_field="kind"):
    """Gradients take the seconds that a file lists.

    Attributes:
        path: Text with a line for each worker, of the seconds of its batches, with spaces or commas
            between. A worker starts its line anew at the end; workers beyond the last line
            take lines from the first again.
    """

    path: Annotated[str, msgspec.Meta(examples=["seconds.txt"])]

    def gradient_s(self, rank: int, n: int, batch: int, seed: int) -> float:
        """As listed.

        Raises:
            ConfigError: The file cannot be read so.
        """
        try:
            rows = _read(self.path)
        except (OSError, ValueError) as error:
            raise ConfigError(self._wrong(error, "compute")) from error
        row = rows[rank % len(rows)]
        return row[batch % len(row)]

    def refused(self, path: str) -> list[Violation]:
        """A file that holds something else."""
        try:
            _read(self.path)
        except (OSError, ValueError) as error:
            return self._wrong(error, path)
        return []

    def _wrong(self, error: Exception, path: str) -> list[Violation]:
        rule = f"holds no seconds of gradients ({error})"
        return [
            Violation(
                path=f"{path}.path", value=self.path, rule=rule, legal=f'"seconds.txt" ({_FORM})'
            )
        ]


@cache
def _read(path: str) -> tuple[tuple[float, ...], ...]:
    """The numbers, read once."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    split = (line.replace(",", " ").split() for line in lines)
    rows = tuple(tuple(float(number) for number in each) for each in split if each)
    if not rows:
        raise ValueError("no numbers")
    for row in rows:
        for number in row:
            if not (number > 0 and math.isfinite(number)):
                raise ValueError(f"{number} is no positive number")
    return rows
