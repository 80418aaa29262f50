"""torchtitan: its TOML configuration.

Written against `torchtitan/config/job_config.py` of torchtitan 0.2, the last that reads TOML; later
ones take the same names as fields of Python configurations. Modules are named as in its Llama 3
and Qwen 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import tomli_w

from ...errors import Violation
from .kind import Tool, header
from .sketch import Sketch, wrong

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_ENDS = {"embed": ("tok_embeddings",), "head": ("norm", "output")}


class TorchTitan(Tool):
    """FSDP2 over shards, tensor parts with split tokens, torch's own pipelines."""

    name: ClassVar[str] = "torchtitan"
    title: ClassVar[str] = "torchtitan"
    version: ClassVar[str] = "TOML of 0.2"
    orders: ClassVar[Mapping[str, str]] = {
        "1f1b": "1F1B",
        "gpipe": "GPipe",
        "interleaved": "Interleaved1F1B",
        "dualpipe-v": "DualPipeV",
    }
    experts: ClassVar[str] = "torchtitan has no model with experts of those that are planned here"

    def refused(self, sketch: Sketch) -> Iterator[Violation]:
        """What FSDP2 and DDP do otherwise there, and choices of blocks that it does not have."""
        if not sketch.is_stack:
            rule = "hold no stack of transformer blocks, and torchtitan trains nothing else"
            yield wrong("stages", None, rule, "a model of layers embed, block.0, ..., head")
            return
        if sketch.tp > 1 and not sketch.sp:
            rule = "are whole in the plan, and torchtitan's tensor parts always split them"
            yield wrong("layer_plans", "tokens", rule, "parallel.sp = true")
        yield from _data(sketch)
        if sketch.recomputes == "some" and _every(sketch) is None:
            rule = "are recomputed in a choice that torchtitan does not have"
            legal = "all or none (parallel.recompute), or every n-th of each rank's"
            yield wrong("layer_plans", "some blocks", rule, legal)

    def write(self, sketch: Sketch) -> str:
        """Tables `training`, `parallelism` and `activation_checkpoint`."""
        return header(self, sketch, self.notes(sketch)) + tomli_w.dumps(self._tables(sketch))

    def notes(self, sketch: Sketch) -> Iterator[str]:
        """What is exchanged unlike the plan."""
        plan = sketch.plan
        yield "Tables of the model, the data and the optimizer are yours."
        several = sketch.pp == 1 and plan.microbatches > 1
        if several and sketch.level == "none" and sketch.data > 1:
            yield "Gradients are all-reduced in each microbatch, in the plan once a step."
        if several and sketch.level == "grads":
            yield "Parameters are gathered in each microbatch, in the plan once a step."
        if sketch.level == "none" and sketch.data > 1:
            yield "Buckets have DDP's size, 100 MiB, and are reduced in the backward pass."
        if sketch.recomputed_ends:
            yield f"Not recomputed here: {', '.join(sketch.recomputed_ends)}."
        if sketch.level != "none" and not (plan.overlap and plan.prefetch):
            yield "FSDP2 always gathers ahead and reduces beside the backward pass."

    def _tables(self, sketch: Sketch) -> dict[str, dict[str, Any]]:
        plan, pipeline = sketch.plan, sketch.pp > 1
        parallelism: dict[str, Any] = {
            "data_parallel_replicate_degree": sketch.replica,
            "data_parallel_shard_degree": sketch.shard,
            "tensor_parallel_degree": sketch.tp,
            "pipeline_parallel_degree": sketch.pp,
        }
        if sketch.level != "none":
            reshard = "always" if sketch.level == "params" else "never"
            parallelism["fsdp_reshard_after_forward"] = reshard
        if pipeline:
            parallelism["pipeline_parallel_schedule"] = self.orders[plan.order_name]
            parallelism["pipeline_parallel_microbatch_size"] = sketch.microbatch
            parallelism["module_fqns_per_model_part"] = [
                [module for name in stage.layers for module in _modules(name)]
                for stage in plan.stages
            ]
        return {
            "training": {
                "local_batch_size": sketch.microbatch * (plan.microbatches if pipeline else 1),
                "global_batch_size": plan.global_batch,
                "seq_len": plan.seq_len,
                "mixed_precision_param": _DTYPES[plan.precision],
                "mixed_precision_reduce": "float32",
            },
            "parallelism": parallelism,
            "activation_checkpoint": _checkpointing(sketch),
        }


def _data(sketch: Sketch) -> Iterator[Violation]:
    """Levels as FSDP2 runs them: a pipeline reduces once a step, accumulation in each pass."""
    plan, beside = sketch.plan, sketch.tp > 1 or sketch.pp > 1
    if sketch.level == "none" and sketch.data > 1 and beside:
        rule = "goes with no other axis: torchtitan's DDP is alone"
        legal = '"optimizer" with parallel.pp, "grads" or "params" without (parallel.level)'
        yield wrong("layer_plans", "none", f"level {rule}", legal)
    elif sketch.level == "none" and beside and plan.precision == "bf16":
        rule = "needs shards beside tp or pp: torchtitan casts in FSDP2 alone"
        yield wrong("precision", "bf16", rule, '"fp32" (train.precision), or parallel.shard > 1')
    if sketch.pp > 1 and sketch.level in ("grads", "params"):
        rule = "is not for pipelines: torch's stages keep whole gradients until the last microbatch"
        yield wrong("layer_plans", sketch.level, rule, '"optimizer" (parallel.level)')
    if sketch.pp == 1 and sketch.level == "optimizer" and plan.microbatches > 1:
        rule = "keeps whole gradients over microbatches, and torchtitan reduces them in each"
        yield wrong("layer_plans", "optimizer", rule, '"grads" or "params" (parallel.level)')


def _modules(layer: str) -> tuple[str, ...]:
    return _ENDS.get(layer, (f"layers.{layer.rpartition('.')[2]}",))


def _checkpointing(sketch: Sketch) -> dict[str, str]:
    if sketch.recomputes == "some":
        return {"mode": "selective", "selective_ac_option": str(_every(sketch))}
    return {"mode": "full" if sketch.recomputes == "all" else "none"}


def _every(sketch: Sketch) -> int | None:
    """Every how manieth of a rank's blocks is recomputed; None if it is no such choice."""
    ranks = [
        [each for stage in sketch.grid.stages_of(pipe) for each in sketch.recomputed[stage]]
        for pipe in range(sketch.pp)
    ]
    step = min(rank.index(True) + 1 for rank in ranks if True in rank)
    alike = all(
        each == (index % step == 0) for rank in ranks for index, each in enumerate(rank, start=1)
    )
    return step if alike else None
