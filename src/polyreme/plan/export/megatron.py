"""Megatron-LM: flags of its training scripts, as a bash array.

Written against the arguments of Megatron-LM with core 0.16 (`megatron/training/arguments.py`);
Megatron-FSDP has its name since core 0.14.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ...errors import Violation
from ..order import ORDERS
from .kind import Tool, header
from .sketch import Sketch, wrong

_FSDP = {"grads": "optim_grads", "params": "optim_grads_params"}
_Flag = tuple[str, object] | tuple[str]


class Megatron(Tool):
    """Stacks of transformer blocks; embedding and head are no layers of its counts."""

    name: ClassVar[str] = "megatron"
    title: ClassVar[str] = "Megatron-LM"
    version: ClassVar[str] = "options of core 0.16"
    orders: ClassVar[Mapping[str, str]] = {"1f1b": "", "interleaved": ""}

    def refused(self, sketch: Sketch) -> Iterator[Violation]:
        """Models that are no stack, sharded gradients in pipelines, other choices of blocks."""
        if not sketch.is_stack:
            rule = f"hold no stack of transformer blocks, and {self.title} has nothing else"
            yield wrong("stages", None, rule, "a model of layers embed, block.0, ..., head")
            return
        if sketch.pp > 1 and sketch.level in _FSDP:
            rule = f"is not for pipelines: {self.title} shards gradients in Megatron-FSDP alone"
            legal = '"optimizer" or "none" (parallel.level), or parallel.pp = 1'
            yield wrong("layer_plans", sketch.level, rule, legal)
        if sketch.ep > 1 and sketch.tp > 1:
            rule = f"devices have whole experts, and {self.title} cuts these into tensor parts too"
            yield wrong("layer_plans", sketch.ep, rule, "parallel.ep = 1, or parallel.tp = 1")
        if sketch.recomputes == "some" and _first_blocks(sketch) is None:
            rule = f"are recomputed in a choice that {self.title} does not have"
            legal = "all or none (parallel.recompute), or the first few of each stage"
            yield wrong("layer_plans", "some blocks", rule, legal)

    def write(self, sketch: Sketch) -> str:
        """``PLAN_ARGS=(...)``, to be sourced, and ``PLAN_WORLD_SIZE``."""
        lines = [
            f"    {' '.join([flag[0], *(shlex.quote(str(value)) for value in flag[1:])])}\n"
            for flag in _flags(sketch)
        ]
        above = header(self, sketch, self.notes(sketch))
        return f"{above}PLAN_WORLD_SIZE={sketch.world}\nPLAN_ARGS=(\n{''.join(lines)})\n"

    def notes(self, sketch: Sketch) -> Iterator[str]:
        """What its flags do not say."""
        yield "Flags of the model, the data and the optimizer are the script's."
        if sketch.level in _FSDP:
            yield "CUDA_DEVICE_MAX_CONNECTIONS has to be other than 1 (Megatron-FSDP)."
        elif sketch.tp > 1:
            yield "CUDA_DEVICE_MAX_CONNECTIONS has to be 1 before Blackwell (tensor parts)."
        if sketch.ep > 1:
            yield "Experts (--num-experts, --moe-router-topk) are the script's too."
        if sketch.recomputed_ends:
            yield f"Not recomputed here: {', '.join(sketch.recomputed_ends)}."
        if sketch.plan.decouple:
            yield "Gradients are all-reduced in the backward pass; the plan decouples that (DeAR)."


def _flags(sketch: Sketch) -> Iterator[_Flag]:
    plan = sketch.plan
    yield ("--num-layers", sum(map(len, sketch.blocks)))
    yield ("--seq-length", plan.seq_len)
    yield ("--micro-batch-size", sketch.microbatch)
    yield ("--global-batch-size", plan.global_batch)
    if plan.precision == "bf16":
        yield ("--bf16",)
    yield ("--tensor-model-parallel-size", sketch.tp)
    if sketch.sp:
        yield ("--sequence-parallel",)
    if sketch.ep > 1:
        yield ("--expert-model-parallel-size", sketch.ep)
        yield ("--moe-token-dispatcher-type", "alltoall")
    yield ("--pipeline-model-parallel-size", sketch.pp)
    if sketch.pp > 1:
        yield from _stages(sketch)
    if sketch.data > 1:
        yield from _level(sketch)
    if sketch.recomputes == "all":
        yield ("--recompute-granularity", "full")
        yield ("--recompute-method", "uniform")
        yield ("--recompute-num-layers", 1)
    elif sketch.recomputes == "some":
        yield ("--recompute-granularity", "full")
        yield ("--recompute-method", "block")
        yield ("--recompute-num-layers", _first_blocks(sketch))


def _stages(sketch: Sketch) -> Iterator[_Flag]:
    """Blocks of each stage, by the plainest flags that say it."""
    counts = [len(stage) for stage in sketch.blocks]
    chunks = ORDERS[sketch.plan.order_name].chunks
    if len(set(counts)) == 1:
        if chunks > 1:
            yield ("--num-layers-per-virtual-pipeline-stage", counts[0])
    elif chunks == 1 and all(counts) and len(set(counts[1:-1])) <= 1:
        yield ("--decoder-first-pipeline-num-layers", counts[0])
        if sketch.pp > 2:
            yield ("--decoder-last-pipeline-num-layers", counts[-1])
    else:
        stages = ["t" * count for count in counts]
        yield ("--pipeline-model-parallel-layout", f"E{'|'.join(stages)}L")


def _level(sketch: Sketch) -> Iterator[_Flag]:
    """How data ranks share states, and what is exchanged beside computation."""
    plan = sketch.plan
    if sketch.level != "none":
        yield ("--use-distributed-optimizer",)
        if sketch.replica > 1:
            yield ("--num-distributed-optimizer-instances", sketch.replica)
    if sketch.level in _FSDP:
        yield ("--use-megatron-fsdp",)
        yield ("--data-parallel-sharding-strategy", _FSDP[sketch.level])
        yield ("--no-gradient-accumulation-fusion",)
        yield ("--ckpt-format", "fsdp_dtensor")
    if plan.overlap:
        yield ("--overlap-grad-reduce",)
        if sketch.level == "none":
            yield ("--ddp-bucket-size", sketch.bucket_elements)
        if plan.prefetch and sketch.level != "none":
            yield ("--overlap-param-gather",)


def _first_blocks(sketch: Sketch) -> int | None:
    """How many of each stage's blocks are recomputed, if they are the first; None if not."""
    most = max(sum(stage) for stage in sketch.recomputed)
    alike = all(
        each == (index < most) for stage in sketch.recomputed for index, each in enumerate(stage)
    )
    return most if alike else None
