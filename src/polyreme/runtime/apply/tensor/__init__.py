"""Tensor (and sequence) parallelism of layers: what a process holds of each, and where parts meet.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.
"""

from .loss import SplitLoss, argmax, cross_entropy
from .part import Tp
from .split import split

__all__ = ["SplitLoss", "Tp", "argmax", "cross_entropy", "split"]
