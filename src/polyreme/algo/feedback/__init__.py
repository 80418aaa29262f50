"""Feedbacks: what becomes of what was not sent. One file a feedback, one line in the union."""

from __future__ import annotations

from .detached import DEF as DEF
from .dgc import DGC as DGC
from .ecq import ECQ as ECQ
from .error import ErrorFeedback as ErrorFeedback
from .gmc import GMC as GMC
from .none import NoFeedback as NoFeedback
from .one_bit_adam import OneBitAdam as OneBitAdam
from .shift import DIANA as DIANA
from .shift import EF21 as EF21
from .worker_momentum import WorkerMomentum as WorkerMomentum

Feedback = (
    NoFeedback | ErrorFeedback | ECQ | EF21 | DIANA | DEF | GMC | DGC | WorkerMomentum | OneBitAdam
)
