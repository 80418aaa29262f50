"""Says that kernels are compiled, where a first run would else be silent for tens of seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from numba.core.event import Event, Listener, install_listener

WORDS = "compiling kernels, once on this machine"


class _First(Listener):
    def __init__(self, say: Callable[[], None]) -> None:
        self._say, self._said = say, False

    def on_start(self, event: Event) -> None:
        """Of kernels that a file of numba's cache holds there is no event."""
        if not self._said:
            self._said = True
            self._say()

    def on_end(self, event: Event) -> None:
        """Others follow at once."""


@contextmanager
def told(say: Callable[[], None]) -> Iterator[None]:
    """Calls `say` before the first kernel that is compiled meanwhile; not for one that is kept."""
    with install_listener("numba:compile", _First(say)):
        yield


@contextmanager
def said(progress: bool) -> Iterator[None]:
    """The same with a line for whoever waits, if `progress`."""
    with told(_say) if progress else nullcontext():
        yield


def _say() -> None:
    sys.stderr.write(f"polyreme: {WORDS}\n")
