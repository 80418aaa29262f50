"""Weights from a file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from ....errors import ConfigError, Violation
from .kind import GraphKind, faults

if TYPE_CHECKING:
    import torch

_PATH = "data_parallel.topology.graph.path"
_FORMS = "a file of n rows of n numbers: .npy, .json (a list of lists), or text"


class Matrix(GraphKind, frozen=True, kw_only=True, tag="Matrix", tag_field="kind"):
    """Weights from a file, the same at every step: row i is what worker i takes of each.

    Source: Xiao and Boyd 2004, "Fast linear iterations for distributed averaging", theorem 1 (what
    such weights must hold).

    Attributes:
        path: .npy, .json (a list of lists), or text with spaces or commas between numbers.
    """

    symmetric: ClassVar[bool] = False
    path: str

    def weights(self, n: int, step: int, seed: int = 0) -> torch.Tensor:
        """The matrix.

        Raises:
            ConfigError: The file holds none.
        """
        import torch

        try:
            return torch.tensor(_read(self.path), dtype=torch.float64)
        except (OSError, ValueError, TypeError) as error:
            rule = f"holds no matrix ({error})"
            raise ConfigError([self._violation(rule, _FORMS)]) from error

    def refused(self, n: int, *, columns_only: bool = False) -> list[Violation]:
        """A square of numbers, as many as workers, stochastic, connected."""
        try:
            weights = self.weights(n, 0)
        except ConfigError as error:
            return list(error.violations)
        if tuple(weights.shape) != (n, n):
            shape = " x ".join(map(str, weights.shape))
            rule = f"holds {shape} numbers for {n} workers"
            return [self._violation(rule, f"{n} x {n} numbers")]
        found = faults(weights, columns_only=columns_only)
        return [self._violation(rule, legal) for rule, legal in found]

    def _violation(self, rule: str, legal: str) -> Violation:
        return Violation(path=_PATH, value=self.path, rule=rule, legal=legal)


@cache
def _read(path: str) -> list[list[float]]:
    """The numbers, read once."""
    import numpy as np

    rows: list[list[float]]
    if path.endswith(".npy"):
        rows = np.load(path, allow_pickle=False).tolist()
    elif path.endswith(".json"):
        rows = json.loads(Path(path).read_text(encoding="utf-8"))
    else:
        text = Path(path).read_text(encoding="utf-8")
        lines = (line.replace(",", " ").split() for line in text.splitlines())
        rows = [[float(number) for number in line] for line in lines if line]
    return rows
