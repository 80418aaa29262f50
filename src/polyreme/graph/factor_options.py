"""`[model]` of a spec: factors of a matrix, trained on all samples as linear models are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

import msgspec

from .model_kind import ModelKind
from .reads import Reads

if TYPE_CHECKING:
    from ..sample import SampleSpec
    from .layer import LayerGraph

_Count = Annotated[int, msgspec.Meta(ge=1)]


class MatrixFactorization(ModelKind, frozen=True, kw_only=True, tag="matrix_factorization"):
    """A vector for each user and each item, whose product is the pair's value.

    P(U, V) = 1/n sum_(i, j) (u_i v_j - r_ij)^2 / 2 + l2/2 (|U|^2 + |V|^2), in float64 on
    processors; over the pairs that are there. It begins at small factors, drawn at random.

    Attributes:
        rank: Numbers of a vector.
        l2: Weight of half the sum of all their squares. Beside the mean over n pairs it is small:
            a user has the data's weight of its pairs over n.
    """

    trains_by_program: ClassVar[bool] = True

    rank: _Count
    l2: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    @property
    def reads(self) -> Reads:
        """Pairs of users and items."""
        return Reads(forms=("ratings",))

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """One layer."""
        from .factors import matrix_factorization

        return matrix_factorization(self, sample)


class PCA(ModelKind, frozen=True, kw_only=True, tag="pca"):
    """The leading directions of the rows' covariance, or second moment; labels are left out.

    P(W) = -1/(2n) sum_i |W^T (x_i - m)|^2 with W^T W = I, in float64 on processors; m is the mean
    of all training rows, or 0. Sparse rows stay so.

    Attributes:
        components: Directions, at the most as many as features.
        center: Whether m is the mean; without, these are the directions of a truncated singular
            value decomposition.
    """

    trains_by_program: ClassVar[bool] = True

    components: _Count = 1
    center: bool = True

    @property
    def reads(self) -> Reads:
        """Features."""
        return Reads(forms=("features",))

    def graph(self, sample: SampleSpec) -> LayerGraph:
        """One layer."""
        from .pca import pca

        return pca(self, sample)
