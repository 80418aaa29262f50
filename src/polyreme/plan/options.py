"""`[parallel]` of a spec: any part of the plan that the user fixes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..errors import Violation, nearest_first
from .ir import Level
from .order import ORDERS

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
        cp: Context-parallel degree.
        ep: Expert-parallel degree.
        pp: Pipeline stages.
        microbatch: Samples per device and pass; the rest of the batch is accumulated.
        recompute: Whether activations are computed again in the backward pass.
        order: Order of a pipeline's actions.
        bucket_bytes: Size at which a bucket of gradients is reduced.
        overlap: Whether gradients are reduced while the backward pass runs.
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
    microbatch: _Degree | None = None
    recompute: Literal["none", "all"] | None = None
    order: str | None = None
    bucket_bytes: _Degree | None = None
    overlap: bool | None = None

    def check(self) -> list[Violation]:
        """A plan stands alone; a level needs a shard axis; no axis that cannot be run yet."""
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
        planned = "is planned, but not executable yet"
        for axis in ("tp", "cp", "ep", "pp"):
            if given.get(axis, 1) > 1:
                found.append(_refused(axis, given[axis], planned, "1"))
        if self.sp:
            found.append(_refused("sp", True, planned, "false"))
        if self.order is not None and self.order not in ORDERS:
            legal = ", ".join(nearest_first(self.order, list(ORDERS)))
            found.append(_refused("order", self.order, "is no order", legal))
        elif self.order is not None:
            rule = f"{planned}: an order belongs to parallel.pp > 1"
            found.append(_refused("order", self.order, rule, "leave it out"))
        return found


def _refused(name: str, value: object, rule: str, legal: str) -> Violation:
    return Violation(path=f"parallel.{name}", value=value, rule=rule, legal=legal)
