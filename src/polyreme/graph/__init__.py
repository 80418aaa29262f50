"""Models as graphs of layers. Importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .layer import Layer as Layer
from .layer import LayerGraph as LayerGraph

if TYPE_CHECKING:
    from .module import from_module as from_module


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is asked for."""
    if name == "from_module":
        from .module import from_module

        return from_module
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
