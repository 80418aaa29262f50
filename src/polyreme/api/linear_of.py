"""What a linear model of a spec minimises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..convex.problem import Objective, Penalty
from ..graph.options import Linear

if TYPE_CHECKING:
    from ..spec import Spec


def objective_of(spec: Spec) -> Objective | None:
    """Loss and penalty; None for models of layers."""
    model = spec.model
    if not isinstance(model, Linear):
        return None
    penalty = Penalty(
        l1=model.l1, l2=model.l2, group_l1=model.group_l1, group_size=model.group_size
    )
    return Objective(loss=model.loss, gamma=model.gamma, penalty=penalty)


def of_two_classes(spec: Spec) -> bool:
    """Whether labels must be two classes."""
    objective = objective_of(spec)
    return objective is not None and objective.classifies
