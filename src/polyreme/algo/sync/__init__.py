"""Syncs: when replicas exchange. One file a sync, one line in the union."""

from __future__ import annotations

from .ad_psgd import ADPSGD as ADPSGD
from .adaptive_period import AdaptivePeriod as AdaptivePeriod
from .admm import ADMM as ADMM
from .asgd import ASGD as ASGD
from .async_admm import AsyncADMM as AsyncADMM
from .backup_workers import BackupWorkers as BackupWorkers
from .basgd import BASGD as BASGD
from .block_coordinate import BlockCoordinate as BlockCoordinate
from .cocoa import CoCoA as CoCoA
from .cser import CSER as CSER
from .dane import DANE as DANE
from .delayed_block import DelayedBlockProximal as DelayedBlockProximal
from .downpour import Downpour as Downpour
from .dsvrg import DSVRG as DSVRG
from .easgd import EASGD as EASGD
from .every_step import EveryStep as EveryStep
from .fed_avg import FedAvg as FedAvg
from .growing_batch import GrowingBatch as GrowingBatch
from .hogwild import Hogwild as Hogwild
from .lazy import LAG as LAG
from .lazy import ThreePoint as ThreePoint
from .local_steps import DiLoCo as DiLoCo
from .local_steps import LocalSteps as LocalSteps
from .orlomo import OrLoMo as OrLoMo
from .ormo import OrMo as OrMo
from .ormo import OrMoDA as OrMoDA
from .owlqn import OWLQN as OWLQN
from .partial_reduce import PartialReduce as PartialReduce
from .push_sum import AsyncPushSum as AsyncPushSum
from .r2sp import R2SP as R2SP
from .scope import PSCOPE as PSCOPE
from .scope import SCOPE as SCOPE
from .shifted_momentum import ShiftedMomentum as ShiftedMomentum
from .smega2 import SMEGA2 as SMEGA2
from .ssp import SSP as SSP

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
    | BASGD
    | ShiftedMomentum
    | SMEGA2
    | OrMo
    | OrMoDA
    | OrLoMo
    | SSP
    | BackupWorkers
    | R2SP
    | Downpour
    | EASGD
    | AsyncADMM
    | DelayedBlockProximal
    | Hogwild
    | PartialReduce
    | ADPSGD
    | AsyncPushSum
    | SCOPE
    | PSCOPE
    | DSVRG
    | DANE
    | CoCoA
    | ADMM
    | BlockCoordinate
    | OWLQN
)
