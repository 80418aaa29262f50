"""What the optimisation does, whatever the machines: `[train]` of a spec."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .schedule import Constant, Schedule

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Train(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length, batch, precision and habits of a run.

    Exactly one of `steps` and `epochs` is given. `global_batch` counts samples over all devices;
    `seq_len` tokens per sample (text only). `precision` "auto" is bf16 on accelerators that have
    it and fp32 elsewhere. `clip_norm` bounds the global gradient norm. `eval_every` and
    `checkpoint_every` count steps; unset means at the end only; `keep` is how many checkpoints
    stay. `tail` says what happens with the last, incomplete batch of an epoch: dropped, used as a
    smaller batch, or filled from the next epoch. `log_every` thins the step events.
    """

    steps: _Positive | None = None
    epochs: _Positive | None = None
    global_batch: _Positive = 32
    seq_len: _Positive | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    schedule: Schedule = Constant()
    clip_norm: Annotated[float, msgspec.Meta(gt=0)] | None = None
    eval_every: _Positive | None = None
    checkpoint_every: _Positive | None = None
    keep: _Positive = 2
    tail: Literal["drop", "short", "wrap"] = "drop"
    compile: bool = False
    log_every: _Positive = 1
    max_skipped: _Positive = 20
