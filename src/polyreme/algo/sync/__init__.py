"""Syncs: when replicas exchange. One file a sync, one line in the union."""

from __future__ import annotations

from .ad_psgd import ADPSGD as ADPSGD
from .adaptive_period import AdaptivePeriod as AdaptivePeriod
from .asgd import ASGD as ASGD
from .cser import CSER as CSER
from .every_step import EveryStep as EveryStep
from .fed_avg import FedAvg as FedAvg
from .growing_batch import GrowingBatch as GrowingBatch
from .lazy import LAG as LAG
from .lazy import ThreePoint as ThreePoint
from .local_steps import DiLoCo as DiLoCo
from .local_steps import LocalSteps as LocalSteps
from .orlomo import OrLoMo as OrLoMo
from .ormo import OrMo as OrMo
from .ormo import OrMoDA as OrMoDA
from .partial_reduce import PartialReduce as PartialReduce
from .push_sum import AsyncPushSum as AsyncPushSum
from .shifted_momentum import ShiftedMomentum as ShiftedMomentum
from .smega2 import SMEGA2 as SMEGA2

Sync = (
    EveryStep
    | LocalSteps
    | AdaptivePeriod
    | DiLoCo
    | FedAvg
    | GrowingBatch
    | LAG
    | ThreePoint
    | CSER
    | ASGD
    | ShiftedMomentum
    | SMEGA2
    | OrMo
    | OrMoDA
    | OrLoMo
    | PartialReduce
    | ADPSGD
    | AsyncPushSum
)
