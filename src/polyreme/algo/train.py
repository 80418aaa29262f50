"""What the optimisation does, whatever the machines: `[train]` of a spec."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..errors import Violation
from .goal import Goal
from .schedule import Constant, Schedule

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class Train(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Length, batch, precision and habits of a run.

    Attributes:
        steps: Optimizer steps of the run; exactly one of steps and epochs is given.
        epochs: Passes over the training samples.
        global_batch: Samples of one step, over all devices.
        seq_len: Tokens of a sample; for text, and only there.
        seed: Fixes initial weights, the order of samples, and dropout.
        precision: What layers compute in; master weights are fp32 (fp64 under "fp64"). "auto" is
            bf16 on accelerators that have it and fp32 elsewhere.
        schedule: Factor on the learning rate as the run goes on.
        gap: The run ends before its last step where a linear model's objective is known to be
            within so much of its optimum: at every step under syncs that find a bound there, at
            evaluations under others. A step that finds it so leaves the model as it is.
        gradient_norm: The same, where the largest entry of w - prox(w - g) is at most so much; g
            is the gradient of the mean loss, so that without l1 it is the whole gradient's, over
            1 + l2. Of the model of factors or PCA: what evaluations call gradient. CoCoA looks at
            evaluations. With both given, one is enough.
        clip_norm: Bound on the global gradient norm; none unless given.
        eval_every: Steps between evaluations; unless given, one at the end.
        checkpoint_every: Steps between checkpoints; unless given, one at the end.
        keep: How many of the newest checkpoints stay.
        keep_best: Metric of which the checkpoint with the best value stays too; it is evaluated
            before every checkpoint then.
        on_save_error: Whether a checkpoint that cannot be written ends the run, or is logged
            while training goes on; the one before stays in any case.
        tail: The last, incomplete batch of an epoch is dropped, used as a smaller batch, or
            filled up from the next epoch.
        compile: Whether layers are compiled by torch.
        log_every: Steps between step events in the log.
        log_samples: Whether step events list the samples they trained on; not under FedAvg and
            GrowingBatch, whose workers take batches at a pace of their own.
        max_skipped: Steps in a row that may be skipped as not finite before the run fails.
        timeout_s: Seconds that processes wait for one that does not come before it is named and
            all are ended; every other time limit of a run follows from it.
        restarts: How often a run is started anew from its newest checkpoint after a process died
            or stalled.
        restart_wait_s: Seconds before a restart; doubled each time that no checkpoint came
            between, up to a minute.
        min_devices: Down to how many devices a restart may go where some are lost; unless given,
            it wants as many as before.
    """

    steps: _Positive | None = None
    epochs: _Positive | None = None
    global_batch: _Positive = 32
    seq_len: _Positive | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0
    precision: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    schedule: Schedule = Constant()
    gap: Annotated[float, msgspec.Meta(gt=0)] | None = None
    gradient_norm: Annotated[float, msgspec.Meta(gt=0)] | None = None
    clip_norm: Annotated[float, msgspec.Meta(gt=0)] | None = None
    eval_every: _Positive | None = None
    checkpoint_every: _Positive | None = None
    keep: _Positive = 2
    keep_best: Literal["heldout_loss", "test_accuracy"] | None = None
    on_save_error: Literal["stop", "continue"] = "stop"
    tail: Literal["drop", "short", "wrap"] = "drop"
    compile: bool = False
    log_every: _Positive = 1
    log_samples: bool = False
    max_skipped: _Positive = 20
    timeout_s: Annotated[float, msgspec.Meta(ge=1, le=1e6)] = 600.0
    restarts: Annotated[int, msgspec.Meta(ge=0)] = 3
    restart_wait_s: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1.0
    min_devices: _Positive | None = None

    @property
    def goal(self) -> Goal:
        """What ends the run before its last step."""
        return Goal(gap=self.gap, gradient_norm=self.gradient_norm)

    def check(self) -> list[Violation]:
        """Exactly one of steps and epochs; the warm-up ends before the run does."""
        found = []
        if self.steps is None and self.epochs is None:
            rule = "is missing; exactly one of train.steps and train.epochs is wanted"
            legal = "1000 (or any integer >= 1)"
            found.append(Violation(path="train.steps", value=None, rule=rule, legal=legal))
        if self.steps is not None and self.epochs is not None:
            rule = "stands beside train.steps; exactly one of them is wanted"
            legal = "leave it out"
            found.append(Violation(path="train.epochs", value=self.epochs, rule=rule, legal=legal))
        warmup = self.schedule.warmup
        if self.steps is not None and warmup >= self.steps:
            rule = f"is not below the {self.steps} steps of the run"
            legal = f"0 (or any integer < {self.steps})"
            path = "train.schedule.warmup"
            found.append(Violation(path=path, value=warmup, rule=rule, legal=legal))
        return found
