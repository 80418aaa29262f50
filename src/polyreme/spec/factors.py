"""What models ask of the rest of a spec that see sums over all samples, and are not convex."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Violation
from .options import Spec


def factors(spec: Spec) -> Iterator[Violation]:
    """They have float64, no bound on their optimum, and no layers to split."""
    sync, train = spec.data_parallel.sync, spec.train
    if sync.finite_sum and sync.convex:
        name = type(sync).__name__
        rule = f"is of a linear model's convex sum, and the model's is not convex ({name})"
        legal = '"SCOPE", "pSCOPE", "EveryStep"'
        yield Violation(path="data_parallel.sync.kind", value=name, rule=rule, legal=legal)
    rule = "cannot be known: no bound is known of the optimum of this model"
    yield from without(spec, gap=rule, legal="train.gradient_norm = 1e-6")
    if train.precision not in ("auto", "fp64"):
        rule, legal = "is not what this model is solved in", '"fp64" (or "auto")'
        yield Violation(path="train.precision", value=train.precision, rule=rule, legal=legal)
    if spec.data_parallel.rule.ties:
        rule, value = (
            "ties features of a linear model",
            getattr(spec.data_parallel.rule, "group_l1", 0),
        )
        yield Violation(path="data_parallel.rule.group_l1", value=value, rule=rule, legal="0")
    for axis in ("shard", "tp", "cp", "pp"):
        degree = getattr(spec.parallel, axis)
        if degree not in (None, 1):
            rule = "splits layers, and this model is whole on each worker"
            yield Violation(path=f"parallel.{axis}", value=degree, rule=rule, legal="1")


def without(spec: Spec, *, legal: str, **rules: str) -> Iterator[Violation]:
    """Of what ends a run before its last step, what is given though a rule forbids it."""
    for name, rule in rules.items():
        value = getattr(spec.train, name)
        if value is not None:
            yield Violation(path=f"train.{name}", value=value, rule=rule, legal=legal)
