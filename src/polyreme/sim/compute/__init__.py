"""How long workers compute. One file a model, one line in the union."""

from __future__ import annotations

from .constant import Constant as Constant
from .exponential import Exponential as Exponential
from .factors import Factors as Factors
from .file import File as File
from .gamma import Gamma as Gamma
from .heterogeneous import Heterogeneous as Heterogeneous
from .lognormal import LogNormal as LogNormal
from .pareto import Pareto as Pareto
from .periodic import Periodic as Periodic
from .stragglers import Stragglers as Stragglers

Compute = (
    Constant
    | Heterogeneous
    | Factors
    | Exponential
    | LogNormal
    | Gamma
    | Pareto
    | Stragglers
    | Periodic
    | File
)
