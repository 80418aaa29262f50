"""Seconds from a file."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
            between and none missing. A worker starts its line anew at the end; workers beyond the
            last line take lines from the first again.
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
    lines = Path(path).read_text(encoding="utf-8").rstrip().splitlines()
    if not lines:
        raise ValueError("no numbers")
    return tuple(tuple(_numbers(line, number)) for number, line in enumerate(lines, 1))


def _numbers(line: str, number: int) -> Iterator[float]:
    """Of one line: what is missing is no number that nobody wrote."""
    if not line.strip():
        raise ValueError(f"line {number} is blank")
    for place in line.split(","):
        words = place.split()
        if not words:
            raise ValueError(f"line {number} has an empty place beside a comma")
        for word in words:
            try:
                seconds = float(word)
            except ValueError:
                raise ValueError(f"line {number}: {word} is no number") from None
            if not (seconds > 0 and math.isfinite(seconds)):
                raise ValueError(f"line {number}: {word} is no positive number")
            yield seconds
