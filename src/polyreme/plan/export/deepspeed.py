"""DeepSpeed: its JSON configuration.

Written against `deepspeed/runtime/config.py` of DeepSpeed 0.18; tensor parts (`tensor_parallel`)
came with 0.16.4. Stages of a pipeline are an argument of `PipelineModule`: of `pipeline`, the
engine reads `activation_checkpoint_interval` alone.

Without ZeRO, 0.19 takes no fp32 gradients beside `bf16` (and 0.18 shards states all the same), so
that bf16 is `torch_autocast` there. Of `train_batch_size`, the configuration is checked before
AutoTP makes its groups, as if tensor parts were data ranks: it is left out beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ...errors import Violation
from .kind import Tool
from .sketch import Sketch, wrong

_STAGES = {"none": 0, "optimizer": 1, "grads": 2, "params": 3}


class DeepSpeed(Tool):
    """ZeRO over all data ranks; AutoTP; pipelines of equally many layers."""

    name: ClassVar[str] = "deepspeed"
    title: ClassVar[str] = "DeepSpeed"
    version: ClassVar[str] = "configuration of 0.18"
    orders: ClassVar[Mapping[str, str]] = {"1f1b": ""}
    experts: ClassVar[str] = "DeepSpeed is told so by layers of the model (MoE), not by this file"

    def refused(self, sketch: Sketch) -> Iterator[Violation]:
        """Replicas of shards, split tokens, and what does not go together there."""
        if sketch.level != "none" and sketch.replica > 1:
            rule = "are replicas of shards, and ZeRO shards over all data ranks"
            legal = f"parallel.shard = {sketch.data}, parallel.replica = 1"
            yield wrong("stages", sketch.replica, rule, legal)
        if sketch.sp:
            rule = "are split between tensor parts, and AutoTP leaves them whole"
            yield wrong("layer_plans", "tokens", rule, "parallel.sp = false")
        if sketch.tp > 1 and sketch.level == "params":
            rule = "does not go with tensor parts: AutoTP is for ZeRO stages 0 to 2"
            legal = '"none", "optimizer" or "grads" (parallel.level), or parallel.tp = 1'
            yield wrong("layer_plans", "params", rule, legal)
        if sketch.pp > 1:
            yield from _pipeline(sketch)
        if sketch.recomputes == "some":
            rule = "are recomputed, and DeepSpeed's configuration knows all or none"
            yield wrong("layer_plans", "some blocks", rule, "all or none (parallel.recompute)")

    def write(self, sketch: Sketch) -> str:
        """One JSON object."""
        return json.dumps(_config(sketch), indent=2) + "\n"

    def notes(self, sketch: Sketch) -> Iterator[str]:
        """What the script has to be told."""
        plan = sketch.plan
        yield f"{sketch.world} processes; the script makes samples of {plan.seq_len} tokens."
        if sketch.pp > 1:
            how = f'num_stages={sketch.pp}, partition_method="uniform"'
            yield f"PipelineModule takes {how}; its layers are those of the plan, one by one."
        elif sketch.recomputes == "all":
            yield "The model itself has to recompute (gradient_checkpointing_enable() or the like)."
        if sketch.recomputed_ends and sketch.pp == 1:
            yield f"Recomputed in the plan too: {', '.join(sketch.recomputed_ends)}."
        if sketch.tp > 1:
            yield "DeepSpeed's own train_batch_size counts tensor parts as data ranks."
        if plan.decouple:
            yield "Gradients are all-reduced in the backward pass; the plan decouples that (DeAR)."


def uniform(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Layers of each stage as `PipelineModule` deals them: the first ones get one more.

    >>> uniform(10, 4)
    (3, 3, 2, 2)
    """
    each, more = divmod(n_layers, n_stages)
    return tuple(each + (stage < more) for stage in range(n_stages))


def _pipeline(sketch: Sketch) -> Iterator[Violation]:
    if sketch.tp > 1:
        rule = "go with no pipeline: AutoTP cuts models that are whole"
        yield wrong("layer_plans", f"{sketch.tp} tensor parts", rule, "parallel.tp = 1, or pp = 1")
    if sketch.level in ("grads", "params"):
        rule = "is not for pipelines: DeepSpeed's take ZeRO stages 0 and 1"
        legal = '"optimizer" or "none" (parallel.level), or parallel.pp = 1'
        yield wrong("layer_plans", sketch.level, rule, legal)
    sizes = tuple(len(stage.layers) for stage in sketch.plan.stages)
    dealt = uniform(sum(sizes), len(sizes))
    if sizes != dealt:
        rule = "are not the numbers of layers that DeepSpeed deals out"
        yield wrong("stages", list(sizes), rule, f"parallel.stages = {list(dealt)}")


def _config(sketch: Sketch) -> dict[str, Any]:
    plan = sketch.plan
    zero: dict[str, Any] = {"stage": _STAGES[sketch.level]}
    if sketch.level != "none":
        zero["overlap_comm"] = plan.overlap
        zero["contiguous_gradients"] = True
    bf16, whole = plan.precision == "bf16", sketch.level == "none"
    config: dict[str, Any] = {
        **({} if sketch.tp > 1 else {"train_batch_size": plan.global_batch}),
        "train_micro_batch_size_per_gpu": sketch.microbatch,
        "gradient_accumulation_steps": plan.microbatches,
        "bf16": {"enabled": bf16 and not whole},
        "zero_optimization": zero,
    }
    if bf16 and whole:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif bf16:
        config["communication_data_type"] = "fp32"
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if sketch.tp > 1:
        config["tensor_parallel"] = {"autotp_size": sketch.tp}
    if sketch.pp > 1:
        interval = int(sketch.recomputes == "all")
        config["pipeline"] = {
            "stages": sketch.pp,
            "partition": "uniform",
            "activation_checkpoint_interval": interval,
        }
    if sketch.recomputes == "all":
        config["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": False,
        }
    return config
