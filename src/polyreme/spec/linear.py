"""What a linear model asks of the rest of a spec, and what is for linear models alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from ..algo.compose import DataParallel
from ..algo.legal import tag
from ..algo.rule import Rule
from ..algo.sync import LAG
from ..algo.sync.kind import SyncKind
from ..algo.sync.served_kind import ServedKind
from ..errors import Violation
from ..graph.options import Linear
from .factors import factors, without
from .fit import with_penalty
from .options import Spec


def linear(spec: Spec) -> Iterator[Violation]:
    """Sums over all samples are of linear models, which have float64 and no layers to split."""
    if isinstance(spec.model, Linear):
        yield from _numbers(spec, spec.model)
        yield from _wanted(type(spec.data_parallel.sync), spec.model)
        yield from _penalty(spec, spec.model)
    elif spec.model.trains_by_program:
        yield from factors(spec)
    else:
        yield from _not_linear(spec)


def _not_linear(spec: Spec) -> Iterator[Violation]:
    sync, rule = spec.data_parallel.sync, spec.data_parallel.rule
    if sync.finite_sum:
        name = type(sync).__name__
        why = f"sums over all samples of a linear model, and the model is none ({name})"
        legal = '"EveryStep", "LocalSteps", "ASGD" (or model.kind = "linear")'
        yield Violation(path="data_parallel.sync.kind", value=name, rule=why, legal=legal)
    yield from without(
        spec,
        gap="is of the optimum of a convex problem, and the model is not linear",
        gradient_norm="is of a sum over all samples, which this model's gradients are not of",
        legal='leave it out (or model.kind = "linear")',
    )
    if rule.ties:
        why = "ties features of a linear model, and the model is none, whose tensors may be split"
        legal = '0 (or model.kind = "linear")'
        value = getattr(rule, "group_l1", True)
        yield Violation(path="data_parallel.rule.group_l1", value=value, rule=why, legal=legal)


def _numbers(spec: Spec, model: Linear) -> Iterator[Violation]:
    """What it is solved in, what ends it, and that it is whole."""
    if spec.train.precision not in ("auto", "fp64"):
        rule = "is not what a linear model is solved in"
        legal = '"fp64" (or "auto")'
        yield Violation(path="train.precision", value=spec.train.precision, rule=rule, legal=legal)
    if not (model.l1 or model.l2 or model.group_l1):
        legal = "train.gradient_norm = 1e-6, or model.l2 = 1e-6 (any penalty above 0)"
        yield from without(spec, gap="cannot be known without a penalty", legal=legal)
    for axis in ("shard", "tp", "cp", "pp"):
        degree = getattr(spec.parallel, axis)
        if degree not in (None, 1):
            rule = "splits layers, and a linear model is whole on each worker"
            yield Violation(path=f"parallel.{axis}", value=degree, rule=rule, legal="1")


def _wanted(sync: type[SyncKind], model: Linear) -> Iterator[Violation]:
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


def _penalty(spec: Spec, model: Linear) -> Iterator[Violation]:
    """Whoever takes steps must take those of the penalty, all of it and the model's."""
    sync, rule = spec.data_parallel.sync, spec.data_parallel.rule
    name = type(sync).__name__
    if isinstance(sync, LAG) and sync.xi and not model.smooth:
        why = "measures steps by gradients, which are not 0 where model.l1 or model.group_l1 holds"
        path, legal = "data_parallel.sync.xi", '0 (or data_parallel.sync "EveryStep", "ThreePoint")'
        yield Violation(path=path, value=sync.xi, rule=why, legal=legal)
    if sync.finite_sum:
        return
    left = [each for each in ("l1", "group_l1") if getattr(model, each)]
    left = [each for each in left if each not in rule.penalties]
    if left and isinstance(sync, ServedKind) and sync.owns_momentum:
        why = f"is SGD with momentum, which leaves model.{left[0]} out ({name})"
        legal = f'"ASGD", "SSP", "pSCOPE" (or model.{left[0]} = 0)'
        yield Violation(path="data_parallel.sync.kind", value=name, rule=why, legal=legal)
    elif left:
        why = f"leaves the {' and the '.join(left)} of the model out"
        kinds = [each for each in get_args(Rule) if {*left} <= {*each.penalties}]
        names = ", ".join(f'"{tag(each())}"' for each in kinds)
        legal = f'{names} (or model.{left[0]} = 0, or data_parallel.sync "pSCOPE")'
        yield Violation(path="data_parallel.rule.kind", value=tag(rule), rule=why, legal=legal)
    if type(spec.data_parallel) is DataParallel:  # all of it could be read
        found = with_penalty(spec.data_parallel, model).check()
        yield from (each for each in found if each not in spec.data_parallel.check())
    for option in ("l1", "group_l1", "group_size"):
        given, own = getattr(rule, option, None), getattr(model, option)
        if given is not None and given != own and not (option == "group_size" and model.smooth):
            why = f"is not model.{option}, which the objective has"
            legal = f"leave it out (or {own})"
            path = f"data_parallel.rule.{option}"
            yield Violation(path=path, value=given, rule=why, legal=legal)
