"""`[parallel]` of a spec: any part of the plan that the user fixes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .ir import Level

_Degree = Annotated[int, msgspec.Meta(ge=1)]


class Parallel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user fixes; whatever is unset is searched.

    `plan` names a plan file and excludes the others. Degrees: `replica` (complete copies of the
    model), `shard` (inside a replica; with `level`), `tp`, `cp`, `ep`, `pp`. `microbatch` counts
    samples per device and pass. `recompute` "none" or "all".
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
