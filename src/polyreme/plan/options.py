"""`[parallel]` of a spec: any part of the plan that the user fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from ..errors import Violation, literal, nearest_first
from .ir import Level, Offload
from .order import ANY, ORDERS, families
from .order.kind import Order

DEFAULT_ORDER = "1f1b"
_Degree = Annotated[int, msgspec.Meta(ge=1)]


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user fixes of the split; whatever is not given is searched.

    Attributes:
        plan: A plan file to run; excludes all other keys.
        replica: Complete copies of the model; algorithms work between them.
        shard: Devices inside a replica that share the batch and, by level, its state.
        level: What the shard axis splits: the batch alone ("none"), and optimizer state, and
            gradients, and parameters.
        tp: Tensor-parallel degree.
        sp: Whether activations between tensor-parallel parts are split along the sequence.
        cp: Devices that share the tokens of each sample, in attention too (more than 1 with
            layouts = "unlike" alone: planned, not executable yet).
        ep: Devices, of those that share a replica's batch or tokens, to which the experts of a
            layer are dealt out (more than 1 with layouts = "unlike" alone, for models that have
            experts: planned, not executable yet).
        pp: Pipeline ranks, each with a stage (or several, as the order has it).
        stages: Layers of each stage, from the first to the last.
        layouts: Whether all layers have the same replica, shard, tp and sp ("alike", if not given),
            or each those that suit it, and cp and ep ("unlike": planned, not executable yet).
        offload: What of a layer lies in hosts' memory between uses: nothing ("none"), its optimizer
            states ("optimizer"), or these, its parameters and its gradients ("parameters"); more
            than "none" with layouts = "unlike" alone: planned, not executable yet.
        microbatch: Samples per device and pass; the rest of the batch is accumulated.
        recompute: Whether activations are computed again in the backward pass.
        order: Order of a pipeline's actions ("1f1b" if not given, "any" to let the planner choose);
            `polyreme list orders` has all.
        bucket_bytes: Size at which a bucket of gradients is reduced; by the profile's latencies
            and bandwidths (as MG-WFBP), if not given.
        overlap: Whether gradients are reduced while the backward pass runs.
        prefetch: Whether parameters of a layer are gathered while the layer before it computes.
        decouple: Whether gradients of whole parameters are scattered during the backward pass, and
            gathered during the next step's forward pass (DeAR); where the profile says that it
            is faster, if not given.
        priority: Whether what the next forward pass needs first is gathered first (P3), or what
            the backward pass made first.
    """

    plan: str | None = None
    replica: _Degree | None = None
    shard: _Degree | None = None
    level: Level | None = None
    tp: _Degree | None = None
    sp: bool | None = None
    cp: _Degree | None = None
    ep: _Degree | None = None
    pp: _Degree | None = None
    stages: Annotated[tuple[_Degree, ...], msgspec.Meta(min_length=1)] | None = None
    layouts: Literal["alike", "unlike"] | None = None
    offload: Offload | None = None
    microbatch: _Degree | None = None
    recompute: Literal["none", "all"] | None = None
    order: str | None = None
    bucket_bytes: _Degree | None = None
    overlap: bool | None = None
    prefetch: bool | None = None
    decouple: bool | None = None
    priority: bool | None = None

    def check(self) -> list[Violation]:
        """A plan stands alone; a level needs a shard axis, tokens tensor parts, an order stages."""
        found = []
        given = {
            name: value
            for name in self.__struct_fields__
            if name != "plan" and (value := getattr(self, name)) is not None
        }
        if self.plan is not None:
            rule = "stands beside parallel.plan, which fixes everything"
            found += [_refused(name, value, rule, "leave it out") for name, value in given.items()]
        if self.shard == 1 and self.level not in (None, "none"):
            rule = "has nothing to split: parallel.shard is 1"
            found.append(_refused("level", self.level, rule, '"none" (or parallel.shard > 1)'))
        planned = (
            ("cp", (None, 1), "1"),
            ("ep", (None, 1), "1"),
            ("offload", (None, "none"), '"none"'),
        )
        for name, run, usual in planned if self.layouts != "unlike" else ():
            if getattr(self, name) not in run:
                rule = "is planned, but not executable yet"
                legal = f'{usual} (or parallel.layouts = "unlike", for plans)'
                found.append(_refused(name, getattr(self, name), rule, legal))
        if self.sp and given.get("tp", 1) == 1:
            rule = f"splits tokens over tensor parts, and {_none('tp', self.tp)}"
            found.append(_refused("sp", True, rule, "false (or parallel.tp > 1)"))
        return [*found, *self._pipeline()]

    @property
    def inside(self) -> int:
        """Devices of a replica, as far as they are fixed."""
        return (self.shard or 1) * (self.cp or 1) * (self.tp or 1) * (self.pp or 1)

    @property
    def pipeline(self) -> Order:
        """The order of a pipeline that was asked for, or the default where there is none."""
        return ORDERS.get(self.order or DEFAULT_ORDER, ORDERS[DEFAULT_ORDER])

    def _pipeline(self) -> Iterator[Violation]:
        """An order that there is, and stages, for a pipeline."""
        known = self.order in (None, ANY) or self.order in ORDERS
        if not known:
            legal = ", ".join(map(literal, nearest_first(str(self.order), list(ORDERS))))
            if (self.pp or 1) == 1:
                legal = f"leave it out (or, with parallel.pp > 1, {legal})"
            yield _refused("order", self.order, "is no order", legal)
        if (self.pp or 1) == 1:
            rule = f"belongs to a pipeline, and {_none('pp', self.pp)}"
            named = self.order if known and self.order != ANY else None
            alone = {"order": named, "stages": self.stages}
            for name, value in alone.items():
                if value is not None:
                    yield _refused(name, value, rule, "leave it out (or parallel.pp > 1)")
        elif not known:
            return
        elif self.stages is not None and self.pp is not None:
            n_stages = self.pp * self.pipeline.chunks
            chunks = {each[0].chunks for each in families()} if self.order == ANY else set()
            if len(self.stages) not in {n_stages, *(self.pp * each for each in chunks)}:
                given = len(self.stages)
                rule = f"is for {given} stage{'s' * (given > 1)}, and there are {n_stages}"
                if self.pipeline.chunks > 1:
                    rule += f' ({self.pipeline.chunks} a rank in order "{self.pipeline.name}")'
                each, left = divmod(max(sum(self.stages), n_stages), n_stages)
                sizes = [each + (stage < left) for stage in range(n_stages)]
                legal = f"{literal(sizes)} (or any {n_stages} integers >= 1 that add up"
                legal += " to the model's layers)"
                yield _refused("stages", self.stages, rule, legal)


def degrees_left(values: Sequence[int], others: int, n_devices: int, wanted: int) -> str:
    """Degrees among `values` that leave no device out beside `others` devices, in words.

    Where that is 1 alone, also what would do on fewer devices: `wanted` if it is among the values.
    >>> degrees_left((1, 2, 4, 8), 1, 97, 2)
    '1 (or 2 with --devices 96)'
    """
    fitting = [each for each in values if n_devices % (each * others) == 0]
    if fitting != [1]:
        apart = [each for each in values if n_devices % each == 0]  # the others do not fit either
        return ", ".join(map(str, fitting or apart))
    more = [wanted] if wanted in values else [each for each in values if each > 1]
    steps = {each: each * others for each in more if each * others <= n_devices}
    if not steps:
        return "1"
    fewer = max(n_devices // step * step for step in steps.values())
    shown = ", ".join(str(each) for each, step in steps.items() if fewer % step == 0)
    return f"1 (or {shown} with --devices {fewer})"


def _none(axis: str, degree: int | None) -> str:
    given = "is not given" if degree is None else f"is {degree}"
    return f"parallel.{axis} {given}"


def _refused(name: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"parallel.{name}", value=value, rule=rule, legal=legal)
