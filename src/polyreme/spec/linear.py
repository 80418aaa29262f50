"""What a linear model asks of the rest of a spec, and what is for linear models alone."""

from __future__ import annotations

from collections.abc import Iterator

from ..algo.sync.kind import SyncKind
from ..errors import Violation
from ..graph.options import Linear
from .options import Spec


def linear(spec: Spec) -> Iterator[Violation]:
    """Sums over all samples are of linear models, which have float64 and no layers to split."""
    sync, model = spec.data_parallel.sync, spec.model
    if not isinstance(model, Linear):
        if sync.finite_sum:
            name = type(sync).__name__
            rule = f"sums over all samples of a linear model, and the model is none ({name})"
            legal = '"EveryStep", "LocalSteps", "ASGD" (or model.kind = "linear")'
            yield Violation(path="data_parallel.sync.kind", value=name, rule=rule, legal=legal)
        if spec.train.gap is not None:
            rule = "is of the optimum of a convex problem, and the model is not linear"
            value, legal = spec.train.gap, 'leave it out (or model.kind = "linear")'
            yield Violation(path="train.gap", value=value, rule=rule, legal=legal)
        return
    if spec.train.precision not in ("auto", "fp64"):
        rule = "is not what a linear model is solved in"
        legal = '"fp64" (or "auto")'
        yield Violation(path="train.precision", value=spec.train.precision, rule=rule, legal=legal)
    if spec.train.gap is not None and not (model.l1 or model.l2 or model.group_l1):
        rule = "cannot be known without a penalty"
        legal = "leave it out, or model.l2 = 1e-6 (any penalty above 0)"
        yield Violation(path="train.gap", value=spec.train.gap, rule=rule, legal=legal)
    yield from _penalty(type(sync), model)
    for axis in ("shard", "tp", "cp", "pp"):
        degree = getattr(spec.parallel, axis)
        if degree not in (None, 1):
            rule = "splits layers, and a linear model is whole on each worker"
            yield Violation(path=f"parallel.{axis}", value=degree, rule=rule, legal="1")


def _penalty(sync: type[SyncKind], model: Linear) -> Iterator[Violation]:
    """What a sync wants of it."""
    name = sync.__name__
    if sync.smooth and not model.smooth:
        rule = (
            f"takes gradients of the penalty, and model.l1 or model.group_l1 has none at 0 ({name})"
        )
        yield Violation(path="data_parallel.sync.kind", value=name, rule=rule, legal='"pSCOPE"')
    if sync.strongly and not model.l2:
        rule = f"wants a penalty that is strongly convex, and model.l2 is 0 ({name})"
        legal = '"pSCOPE", "DANE", "ADMM" (or model.l2 = 1e-6, any above 0)'
        yield Violation(path="data_parallel.sync.kind", value=name, rule=rule, legal=legal)
    if sync.by_feature and model.group_l1:
        rule = f"takes each feature's penalty alone, and model.group_l1 ties features ({name})"
        legal = '"pSCOPE", "DANE", "ADMM"'
        yield Violation(path="data_parallel.sync.kind", value=name, rule=rule, legal=legal)
