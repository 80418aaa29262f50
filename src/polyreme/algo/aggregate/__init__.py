"""Aggregators: one vector of many. One file an aggregator, one line in the union."""

from __future__ import annotations

from .bulyan import Bulyan as Bulyan
from .centered_clipping import CenteredClipping as CenteredClipping
from .coordinate_median import CoordinateMedian as CoordinateMedian
from .geometric_median import GeometricMedian as GeometricMedian
from .krum import Krum as Krum
from .majority import MajorityVote as MajorityVote
from .mean import Mean as Mean
from .mean_around_median import MeanAroundMedian as MeanAroundMedian
from .minimum_diameter import MinimumDiameterAveraging as MinimumDiameterAveraging
from .monna import MoNNA as MoNNA
from .multi_krum import MultiKrum as MultiKrum
from .trimmed_mean import TrimmedMean as TrimmedMean

Aggregator = (
    Mean
    | MajorityVote
    | Krum
    | MultiKrum
    | CoordinateMedian
    | TrimmedMean
    | GeometricMedian
    | CenteredClipping
    | MinimumDiameterAveraging
    | MoNNA
    | MeanAroundMedian
    | Bulyan
)
