"""Rules: how a gradient becomes an update. One file a rule, one line in the union."""

from __future__ import annotations

from .adam import Adam as Adam
from .adamw import AdamW as AdamW
from .kind import State as State
from .lars import LAMB as LAMB
from .lars import LARS as LARS
from .lion import Lion as Lion
from .proximal import ProximalSGD as ProximalSGD
from .proximal import TruncatedGradient as TruncatedGradient
from .sgd import SGD as SGD
from .sign import SignSGD as SignSGD
from .sign import Signum as Signum
from .sngm import SNGD as SNGD
from .sngm import SNGM as SNGM

Rule = (
    SGD
    | Adam
    | AdamW
    | LARS
    | LAMB
    | SNGD
    | SNGM
    | SignSGD
    | Signum
    | Lion
    | ProximalSGD
    | TruncatedGradient
)
