"""polyreme: train a model on whatever machines there are, and get more out of them.

The commands are functions here: ``pr.train(spec)``, ``pr.plan(spec)``, ``pr.graph(module)``.
Five of them (`doctor`, `graph`, `plan`, `profile`, `report`) share their name with a room of the
package, so those rooms' modules can be called. For a training loop of one's own there are
``pr.apply(plan, model)``, ``pr.optim.SNGM(params, lr=0.1)``, ``pr.ddp_hook(algorithm)``,
``pr.compress.topk(x, ratio=0.01)`` and ``pr.aggregate.mean(rows)``; ``pr.linear.fit(X, y, l2=0.1)``
fits a linear model.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_ROOMS = ("doctor", "graph", "plan", "profile", "report")
_FUNCTIONS = ("train", "simulate", "check", "explain", "verify", "weights", "advise")
_LIBRARY = (
    "aggregate",
    "compress",
    "linear",
    "optim",
)  # what users take into their own training loop
_ELSEWHERE = {
    "SampleSpec": "sample",  # what `pr.graph` is told of a sample
    "TensorSpec": "sample",
    "DataParallel": "algo.compose",
    "ddp_hook": "ddp",
    "apply": "api.applying",
}


class _Room(ModuleType):
    """A room that is called as the api function of its name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        api = importlib.import_module("polyreme.api")
        return getattr(api, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """Imports rooms and api functions when they are first named."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ROOMS and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in (*_ROOMS, *_LIBRARY):
            return importlib.import_module(f"polyreme.{name}")
        if name in _FUNCTIONS:
            return getattr(importlib.import_module("polyreme.api"), name)
        if name in _ELSEWHERE:
            return getattr(importlib.import_module(f"polyreme.{_ELSEWHERE[name]}"), name)
        from .errors import absent

        raise absent(__name__, name, [each for each in dir(self) if each[0] != "_"])

    def __dir__(self) -> list[str]:
        return sorted(["__version__", *_ROOMS, *_FUNCTIONS, *_LIBRARY, *_ELSEWHERE])


sys.modules[__name__].__class__ = _Package
