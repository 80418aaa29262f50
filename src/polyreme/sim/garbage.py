"""Fewer searches for garbage in cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_OBJECTS = 200_000


@contextmanager
def seldom() -> Iterator[None]:
    """Python searches for cycles once in so many new objects, unless it does still less.

    Events make many objects and hardly a cycle, and a search walks over the states of all workers.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
