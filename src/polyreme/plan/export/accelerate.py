"""Accelerate: the YAML file of `accelerate launch --config_file`.

Written against `accelerate/commands/config/config_args.py` of Accelerate 1.10, which brought
`parallelism_config`; FSDP of version 2 came with 1.6. Until 1.10, FSDP2 reduces gradients in each
pass; from 1.11 on, `accumulate` keeps them whole unless `sync_each_batch` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ...errors import Violation
from ..ir import BUCKET_BYTES
from .kind import Tool, header
from .sketch import Sketch, wrong

_Scalar = str | int | bool


class Accelerate(Tool):
    """DDP or FSDP2, and tensor parts of transformers models; no pipelines."""

    name: ClassVar[str] = "accelerate"
    title: ClassVar[str] = "Accelerate"
    version: ClassVar[str] = "configuration of 1.10"
    experts: ClassVar[str] = "Accelerate's file has nothing that says so"

    def refused(self, sketch: Sketch) -> Iterator[Violation]:
        """Whole gradients over microbatches, split tokens, replicas beside tensor parts."""
        if sketch.pp > 1:
            return
        if sketch.sp:
            rule = "are split between tensor parts, which Accelerate does not do"
            yield wrong("layer_plans", "tokens", rule, "parallel.sp = false")
        if sketch.level == "none" and sketch.data > 1 and sketch.tp > 1:
            rule = "does not go with tensor parts: Accelerate composes them with FSDP2 alone"
            legal = '"grads" or "params" (parallel.level), or parallel.tp = 1'
            yield wrong("layer_plans", "none", f"level {rule}", legal)
        if sketch.level == "optimizer" and sketch.plan.microbatches > 1:
            rule = (
                "keeps whole gradients over microbatches, and FSDP2 is told to reduce them in each"
            )
            yield wrong("layer_plans", "optimizer", rule, '"grads" or "params" (parallel.level)')
        if sketch.recomputes == "some" or (sketch.recomputes == "all" and sketch.level == "none"):
            which = "some blocks" if sketch.recomputes == "some" else "blocks"
            rule = "are recomputed, and Accelerate's file knows all or none, under FSDP2 alone"
            legal = "none (parallel.recompute), or all with a level"
            yield wrong("layer_plans", which, rule, legal)

    def write(self, sketch: Sketch) -> str:
        """One YAML mapping."""
        fsdp = sketch.level != "none"
        several = sketch.world > 1
        rows: list[tuple[str, _Scalar | Mapping[str, _Scalar]]] = [
            ("compute_environment", "LOCAL_MACHINE"),
            ("distributed_type", "FSDP" if fsdp else "MULTI_GPU" if several else "NO"),
            ("num_processes", sketch.world),
            ("mixed_precision", "bf16" if sketch.plan.precision == "bf16" else "no"),
        ]
        if fsdp:
            rows.append(("fsdp_config", _fsdp(sketch)))
        if fsdp or sketch.tp > 1:
            rows.append(("parallelism_config", _mesh(sketch)))
        return header(self, sketch, self.notes(sketch)) + "".join(_yaml(*row) for row in rows)

    def notes(self, sketch: Sketch) -> Iterator[str]:
        """What the script has to be told, and what is exchanged unlike the plan."""
        plan = sketch.plan
        passes = f"{plan.microbatches} passes (gradient_accumulation_steps)"
        samples = f"{sketch.microbatch} samples a device of {plan.seq_len} tokens"
        yield f"A step of the script is {passes} of {samples}."
        yield "num_machines, machine_rank and main_process_ip are yours."
        if sketch.level != "none" and plan.precision == "bf16":
            yield "Gradients are reduced in bf16, in the plan in fp32."
        if sketch.level != "none" and plan.microbatches > 1:
            how = f"num_steps={plan.microbatches}, sync_each_batch=True"
            yield f"GradientAccumulationPlugin({how}) is the script's: else gradients stay whole."
        if sketch.level == "grads" and plan.microbatches > 1:
            yield "Parameters are gathered in each microbatch, in the plan once a step."
        if sketch.level == "none" and sketch.data > 1 and plan.bucket_bytes != BUCKET_BYTES:
            mib = plan.bucket_bytes / 2**20
            yield f"DistributedDataParallelKwargs(bucket_cap_mb={mib:.1f}) is the script's."
        if sketch.tp > 1:
            yield 'The model is loaded with tp_plan="auto".'
            if sketch.data > 1:
                yield "It is given the Accelerator's device_mesh: else all processes are its parts."
        if sketch.recomputed_ends:
            yield f"Not recomputed here: {', '.join(sketch.recomputed_ends)}."


def _fsdp(sketch: Sketch) -> dict[str, _Scalar]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": sketch.level == "params",
        "fsdp_activation_checkpointing": sketch.recomputes == "all",
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _mesh(sketch: Sketch) -> dict[str, _Scalar]:
    return {
        "parallelism_config_dp_replicate_size": sketch.replica,
        "parallelism_config_dp_shard_size": sketch.shard,
        "parallelism_config_tp_size": sketch.tp,
        "parallelism_config_cp_size": 1,
    }


def _yaml(key: str, value: _Scalar | Mapping[str, _Scalar]) -> str:
    """One entry; a mapping is indented. Words that YAML reads as booleans are quoted."""
    if isinstance(value, Mapping):
        return f"{key}:\n" + "".join("  " + _yaml(*row) for row in value.items())
    if isinstance(value, bool):
        return f"{key}: {str(value).lower()}\n"
    quoted = value in ("no", "NO")
    return f"{key}: '{value}'\n" if quoted else f"{key}: {value}\n"
