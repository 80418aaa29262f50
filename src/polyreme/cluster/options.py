"""`[cluster]` of a spec: which machines. Read and checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import ConfigError, Violation
from .parse import first, parse_preset
from .types import Cluster

_Count = Annotated[int, msgspec.Meta(ge=1)]


class ClusterOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which devices to use; nothing set means all of this machine.

    A cluster that is not this machine can be planned for, not trained on.

    Attributes:
        preset: Other machines by shape: ``8xH100`` (devices) or ``2x8xH100`` (hosts x devices).
        file: Other machines by a cluster.toml; at most one of preset and file is given.
        devices: How many devices to use, the first ones; without an accelerator, the number of
            processes.
        cpu_processes: Number of processes where there is no accelerator; where there is one it
            has no meaning.
    """

    preset: str | None = None
    file: str | None = None
    devices: _Count | None = None
    cpu_processes: _Count | None = None

    def check(self) -> list[Violation]:
        """Every rule that these options break, those of the file included."""
        if self.preset is not None and self.file is not None:
            rule = "stands beside cluster.preset; at most one of them is wanted"
            return [
                Violation(path="cluster.file", value=self.file, rule=rule, legal="leave it out")
            ]
        try:
            self.cluster()
        except ConfigError as error:
            return list(error.violations)
        return []

    def cluster(self) -> Cluster | None:
        """The cluster named here; None: this machine, to be detected.

        Raises:
            ConfigError: what `check` lists.
        """
        if self.preset is not None:
            named = parse_preset(self.preset)
        elif self.file is not None:
            from .file import read

            named = read(Path(self.file), "cluster.file")
        else:
            return None
        return first(named, self.devices) if self.devices else named
