"""A device that works behind its host's back, as far as anybody can tell who asks it."""

from __future__ import annotations

from polyreme.cluster.accelerator import HostAccelerator


class Behind(HostAccelerator):
    """The host, which says that it is none."""

    @property
    def on_host(self) -> bool:
        return False
