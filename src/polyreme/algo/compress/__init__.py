"""Compressors: tensors as fewer bytes. One file a compressor, one line in the union."""

from __future__ import annotations

from .ada_comp import AdaComp as AdaComp
from .atomo import ATOMO as ATOMO
from .cast import Cast as Cast
from .count_sketch import CountSketch as CountSketch
from .dense import Dense as Dense
from .g_top_k import GTopK as GTopK
from .low_rank import LowRank as LowRank
from .natural import Natural as Natural
from .one_bit import OneBit as OneBit
from .power_sgd import PowerSGD as PowerSGD
from .qsgd import QSGD as QSGD
from .random_k import RandomK as RandomK
from .rotated import Rotated as Rotated
from .sign import Sign as Sign
from .sparse_binary import SBC as SBC
from .sparse_binary import STC as STC
from .tern_grad import TernGrad as TernGrad
from .threshold import Threshold as Threshold
from .top_k import TopK as TopK
from .variance import VarianceBased as VarianceBased

Compressor = (
    Dense
    | Cast
    | QSGD
    | TernGrad
    | Natural
    | Sign
    | OneBit
    | TopK
    | RandomK
    | Threshold
    | AdaComp
    | VarianceBased
    | SBC
    | STC
    | Rotated
    | CountSketch
    | GTopK
    | PowerSGD
    | LowRank
    | ATOMO
)
