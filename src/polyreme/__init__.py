"""polyreme: train a model on whatever machines there are, and get more out of them.

The commands are functions here: ``pr.train(spec)``, ``pr.plan(spec)``, ``pr.graph(module)``.
Five of them (`doctor`, `graph`, `plan`, `profile`, `report`) share their name with a room of the
package, so those rooms' modules can be called.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_ROOMS = ("doctor", "graph", "plan", "profile", "report")
_FUNCTIONS = ("train", "check", "verify", "weights")
_TYPES = ("SampleSpec", "TensorSpec")  # what `pr.graph` is told of a sample


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
        if name in _ROOMS:
            return importlib.import_module(f"polyreme.{name}")
        if name in _FUNCTIONS:
            return getattr(importlib.import_module("polyreme.api"), name)
        if name in _TYPES:
            return getattr(importlib.import_module("polyreme.sample"), name)
        raise AttributeError(f"module 'polyreme' has no attribute {name!r}")

    def __dir__(self) -> list[str]:
        return sorted(["__version__", *_ROOMS, *_FUNCTIONS, *_TYPES])


sys.modules[__name__].__class__ = _Package
