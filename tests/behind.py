"""A device that works behind its host's back, as far as anybody can tell who asks it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyreme.cluster.accelerator import HostAccelerator, Timer


class Behind(HostAccelerator):
    """The host, which says that it is none."""

    @property
    def on_host(self) -> bool:
        return False


class Quick(Behind):
    """A device that is through with all that it is asked for in a microsecond."""

    @contextmanager
    def work_timer(self) -> Iterator[Timer]:
        timer = Timer()
        yield timer
        timer.seconds = 1e-6
