"""Syncs: when replicas exchange. One file a sync, one line in the union."""

from __future__ import annotations

from .every_step import EveryStep as EveryStep
from .local_steps import DiLoCo as DiLoCo
from .local_steps import LocalSteps as LocalSteps

Sync = EveryStep | LocalSteps | DiLoCo
