"""`[model] kind = "linear"`: convex problems over sparse or dense features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import msgspec

from .model_kind import ModelKind
from .reads import Reads

if TYPE_CHECKING:
    from ..sample import SampleSpec
    from .layer import LayerGraph

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Linear(ModelKind, frozen=True, kw_only=True, tag="linear"):
    """A weight for each feature: the mean loss plus a penalty is minimised. No intercept.

    P(w) = 1/n sum_i loss(x_i w, y_i) + l1 |w|_1 + group_l1 sum_g |w_g|_2 + l2/2 |w|_2^2, in
    float64 on processors. Data stay sparse where they come so.

    Attributes:
        loss: logistic, squared_hinge (max(0, 1 - y p)^2), hinge (rounded over `gamma`, so that it
            has a slope everywhere), of two classes; or squared ((p - y)^2 / 2), of numbers.
        gamma: Width over which the hinge is rounded.
        l1: Weight of the sum of absolute weights.
        l2: Weight of half the sum of their squares; beside l1 it makes the elastic net.
        group_l1: Weight of the sum of groups' norms.
        group_size: Features of a group: those that follow one another.
    """

    trains_by_program: ClassVar[bool] = True

    loss: Literal["logistic", "squared_hinge", "hinge", "squared"] = "logistic"
    gamma: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    l1: _NotNegative = 0.0
    l2: _NotNegative = 0.0
    group_l1: _NotNegative = 0.0
    group_size: Annotated[int, msgspec.Meta(ge=1)] = 1

    @property
    def smooth(self) -> bool:
        """Whether the penalty is."""
        return not (self.l1 or self.group_l1)

    @property
    def reads(self) -> Reads:
        """Features."""
        return Reads(forms=("features",))

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """One layer."""
        from .linear import linear

        return linear(self, sample)
