"""What a model of a spec minimises that is trained on all samples of a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..convex import problem
from ..convex.factor_task import Factorization
from ..convex.pca_task import Components
from ..graph.options import PCA, Linear, MatrixFactorization

if TYPE_CHECKING:
    from ..convex.sums import Objective
    from ..spec import Spec


def objective_of(spec: Spec) -> Objective | None:
    """Loss and penalty; None for models of layers."""
    match spec.model:
        case Linear() as model:
            penalty = problem.Penalty(
                l1=model.l1, l2=model.l2, group_l1=model.group_l1, group_size=model.group_size
            )
            return problem.Objective(loss=model.loss, gamma=model.gamma, penalty=penalty)
        case MatrixFactorization() as model:
            return Factorization(rank=model.rank, l2=model.l2)
        case PCA() as model:
            return Components(components=model.components, center=model.center)
        case _:
            return None


def of_two_classes(spec: Spec) -> bool:
    """Whether labels must be two classes."""
    return isinstance(spec.model, Linear) and spec.model.loss != "squared"
