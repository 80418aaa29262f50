"""Solvers by name: a new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ...errors import ConfigError, Violation, nearest_first
from .alpa import alpa
from .exact import exact
from .galvatron import galvatron
from .galvatron_bmw import galvatron_bmw
from .grid import grid
from .instance import Assignment, Instance
from .mcmc import mcmc
from .miqp import miqp
from .pipedream import pipedream
from .piper import piper


class Solver(Protocol):
    """What each file of this folder has under its own name."""

    def __call__(
        self, instance: Instance, *, below: float = ..., deadline_s: float = ...
    ) -> Assignment:
        """The best that takes less than `below`, found in some `deadline_s` seconds."""


SOLVERS: Mapping[str, Solver] = {
    "exact": exact,
    "miqp": miqp,
    "grid": grid,
    "galvatron": galvatron,
    "galvatron_bmw": galvatron_bmw,
    "alpa": alpa,
    "piper": piper,
    "pipedream": pipedream,
    "mcmc": mcmc,
}


def find(name: str, path: str = "solver") -> Solver:
    """The solver of that name; `path` is where it was asked for.

    Raises:
        ConfigError: there is none; lists those that there are, nearest first.
    """
    if name in SOLVERS:
        return SOLVERS[name]
    legal = ", ".join(nearest_first(name, list(SOLVERS)))
    raise ConfigError([Violation(path=path, value=name, rule="is no solver", legal=legal)])
