"""Plans in other tools' words: what is written can be read there, and what cannot be is refused."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import tomllib
from unittest import mock

import pytest
import yaml
from torch.distributed.pipelining import schedules

from exported import STACK, made
from polyreme.errors import ConfigError
from polyreme.plan.export import TOOLS, export
from polyreme.plan.export.deepspeed import uniform
from polyreme.plan.ir import Plan
from polyreme.plan.order import ORDERS
from polyreme.plan.play import Costs


def flags(text: str) -> argparse.Namespace:
    """What Megatron-LM's parser makes of the array, with its types and choices."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "num-layers",
        "seq-length",
        "micro-batch-size",
        "global-batch-size",
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "num-layers-per-virtual-pipeline-stage",
        "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers",
        "num-distributed-optimizer-instances",
        "ddp-bucket-size",
        "recompute-num-layers",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in (
        "bf16",
        "sequence-parallel",
        "use-distributed-optimizer",
        "use-megatron-fsdp",
        "overlap-grad-reduce",
        "overlap-param-gather",
        "no-gradient-accumulation-fusion",
    ):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--ckpt-format", choices=["torch", "torch_dist", "fsdp_dtensor"])
    parser.add_argument("--recompute-granularity", choices=["full", "selective"])
    parser.add_argument("--recompute-method", choices=["uniform", "block"])
    choices = ["no_shard", "optim", "optim_grads", "optim_grads_params"]
    parser.add_argument("--data-parallel-sharding-strategy", choices=choices, default="no_shard")
    world, rest = re.search(
        r"^PLAN_WORLD_SIZE=(\d+)\nPLAN_ARGS=\((.*)\)$", text, re.M | re.S
    ).groups()
    found = parser.parse_args(shlex.split(rest))
    found.world_size = int(world)
    return found


PLANS = {
    "one device": {},
    "replicas": {"replica": 4, "microbatches": 1},
    "shards": {"shard": 4, "level": "params"},
    "grads": {"shard": 4, "level": "grads", "precision": "fp32"},
    "replicas of shards": {"replica": 2, "shard": 2, "level": "params", "recompute": STACK},
    "tensor parts": {"shard": 2, "tp": 2, "sp": True, "level": "grads"},
    "whole tokens": {"shard": 2, "tp": 2, "level": "grads"},
    "stages": {"sizes": (2, 2, 2, 2), "shard": 2, "level": "optimizer"},
    "uneven stages": {"sizes": (5, 3), "shard": 2, "level": "optimizer", "recompute": STACK},
    "chunks": {"sizes": (3, 1, 2, 2), "order": "interleaved", "shard": 2, "level": "optimizer"},
}
CANNOT = {  # what of these a tool refuses
    "megatron": (),
    "torchtitan": ("whole tokens",),
    "deepspeed": ("replicas of shards", "tensor parts", "uneven stages", "chunks"),
    "accelerate": ("tensor parts", "stages", "uneven stages", "chunks"),
}
CASES = [(tool, name) for tool in TOOLS for name in PLANS if name not in CANNOT[tool]]


def numbers(tool: str, text: str, plan: Plan) -> dict[str, int]:
    """Degrees and batches that the tool would read; accumulation by the tool's own rule."""
    if tool == "megatron":
        found = flags(text)
        tp, pp = found.tensor_model_parallel_size, found.pipeline_model_parallel_size
        data = found.world_size // (tp * pp)
        batch, each = found.global_batch_size, found.micro_batch_size
        world, seq = found.world_size, found.seq_length
    elif tool == "torchtitan":
        table = tomllib.loads(text)
        axes = table["parallelism"]
        data = axes["data_parallel_replicate_degree"] * axes["data_parallel_shard_degree"]
        tp, pp = axes["tensor_parallel_degree"], axes["pipeline_parallel_degree"]
        batch, each = (table["training"][f"{which}_batch_size"] for which in ("global", "local"))
        if pp > 1:
            assert batch == each * data  # no accumulation beside the pipeline's microbatches
            each = axes["pipeline_parallel_microbatch_size"]
        world, seq = data * tp * pp, table["training"]["seq_len"]
    elif tool == "deepspeed":
        table = json.loads(text)
        tp = table.get("tensor_parallel", {}).get("autotp_size", 1)
        pp = table.get("pipeline", {}).get("stages", 1)
        each, passes = (
            table["train_micro_batch_size_per_gpu"],
            table["gradient_accumulation_steps"],
        )
        batch = table.get("train_batch_size", plan.global_batch)
        data = batch // (each * passes)
        world, seq = data * tp * pp, plan.seq_len
        assert passes == plan.microbatches
    else:
        table = yaml.safe_load(text)
        axes = table.get("parallelism_config", {})
        world, pp, seq = table["num_processes"], 1, plan.seq_len
        tp = axes.get("parallelism_config_tp_size", 1)
        data = world // tp
        batch, each = plan.global_batch, plan.global_batch // (data * plan.microbatches)
        assert math.prod(axes.values()) in (1, world)
    return {
        "world": world,
        "data": data,
        "tp": tp,
        "pp": pp,
        "batch": batch,
        "each": each,
        "seq": seq,
    }


@pytest.mark.parametrize(("tool", "name"), CASES)
def test_what_is_written_reads_back_to_the_plans_numbers(tool: str, name: str) -> None:
    """A batch or a degree that the tool understands otherwise."""
    plan = made(**PLANS[name])
    found = numbers(tool, export(plan, TOOLS[tool]).text, plan)
    how = PLANS[name]
    data = how.get("replica", 1) * how.get("shard", 1)
    pp = len(how.get("sizes", ())) // (2 if "order" in how else 1) or 1
    assert found == {
        "world": data * how.get("tp", 1) * pp,
        "data": data,
        "tp": how.get("tp", 1),
        "pp": pp,
        "batch": data * plan.microbatches * 2,
        "each": 2,
        "seq": 128,
    }


@pytest.mark.parametrize(("tool", "name"), [(t, n) for t, names in CANNOT.items() for n in names])
def test_what_a_tool_lacks_is_not_left_out(tool: str, name: str) -> None:
    """A part of the plan dropped in silence."""
    with pytest.raises(ConfigError):
        export(made(**PLANS[name]), TOOLS[tool])


@pytest.mark.parametrize(
    ("sizes", "order", "expected"),
    [
        ((2, 2, 2, 2), "1f1b", {"first": 1, "last": 1}),
        ((4, 4), "1f1b", {}),
        ((5, 3), "1f1b", {"first": 4}),
        ((1, 4, 3), "1f1b", {"layout": "E|tttt|ttL"}),
        ((3, 2, 1, 2), "1f1b", {"layout": "Ett|tt|t|tL"}),
        ((3, 4, 1), "1f1b", {"layout": "Ett|tttt|L"}),
        ((2, 2, 2, 2), "interleaved", {"layout": "Et|tt|tt|tL"}),
        ((3, 1, 2, 2), "interleaved", {"layout": "Ett|t|tt|tL"}),
    ],
)
def test_megatrons_stages_hold_the_plans_blocks(sizes, order, expected) -> None:
    """Blocks in another stage: embedding and head are layers here and none there."""
    plan = made(sizes=sizes, order=order)
    found = flags(export(plan, TOOLS["megatron"]).text)
    assert found.num_layers == 6
    assert found.decoder_first_pipeline_num_layers == expected.get("first")
    assert found.decoder_last_pipeline_num_layers == expected.get("last")
    assert found.pipeline_model_parallel_layout == expected.get("layout")


def test_megatrons_equal_chunks_need_no_layout() -> None:
    plan = made(sizes=(2, 1, 1, 2), names=("embed", *STACK[1:5], "head"), order="interleaved")
    found = flags(export(plan, TOOLS["megatron"]).text)
    assert found.num_layers_per_virtual_pipeline_stage == 1


def test_torchtitans_parts_are_the_plans_stages() -> None:
    """A module lost between parts."""
    plan = made(sizes=(3, 5), shard=2, level="optimizer")
    table = tomllib.loads(export(plan, TOOLS["torchtitan"]).text)
    parts = table["parallelism"]["module_fqns_per_model_part"]
    assert parts[0] == ["tok_embeddings", "layers.0", "layers.1"]
    assert parts[1] == [*(f"layers.{index}" for index in range(2, 6)), "norm", "output"]


@pytest.mark.parametrize(
    ("level", "microbatches", "expected"),
    [
        ("none", 4, ((), 0, None, "MULTI_GPU")),
        ("optimizer", 1, (("use_distributed_optimizer",), 1, "never", False)),
        ("grads", 4, (("use_megatron_fsdp", "optim_grads"), 2, "never", False)),
        ("params", 4, (("use_megatron_fsdp", "optim_grads_params"), 3, "always", True)),
    ],
)
def test_levels_have_their_names_everywhere(level, microbatches, expected) -> None:
    """A level up or down: another memory than planned."""
    plan = made(shard=4, level=level, microbatches=microbatches)
    megatron = flags(export(plan, TOOLS["megatron"]).text)
    said = {name for name in vars(megatron) if vars(megatron)[name] is True}
    said.add(megatron.data_parallel_sharding_strategy)
    assert set(expected[0]) <= said
    assert ("use_megatron_fsdp" in said) == ("use_megatron_fsdp" in expected[0])
    assert megatron.use_distributed_optimizer == (level != "none")
    deepspeed = json.loads(export(plan, TOOLS["deepspeed"]).text)
    assert deepspeed["zero_optimization"]["stage"] == expected[1]
    titan = tomllib.loads(export(plan, TOOLS["torchtitan"]).text)["parallelism"]
    assert titan.get("fsdp_reshard_after_forward") == expected[2]
    accelerate = yaml.safe_load(export(plan, TOOLS["accelerate"]).text)
    fsdp = accelerate.get("fsdp_config", {})
    kind = accelerate["distributed_type"]
    assert fsdp.get("fsdp_reshard_after_forward", kind) == expected[3]


@pytest.mark.parametrize("tool", TOOLS)
def test_precisions_are_said(tool: str) -> None:
    said = [
        export(made(shard=2, level="params", precision=p), TOOLS[tool]).text
        for p in ("bf16", "fp32")
    ]
    assert said[0] != said[1]


@pytest.mark.parametrize(
    ("recompute", "sizes", "expected"),
    [
        (("block.0", "block.1", "block.3", "block.4"), (4, 4), ("block", 2, None)),
        (("block.1", "block.3", "block.5"), (), (None, None, "2")),
        (("block.2", "block.5"), (4, 4), (None, None, "3")),
        (("block.0", "block.1"), (), ("block", 2, None)),
        (STACK[1:], (), ("uniform", 1, None)),
    ],
)
def test_some_blocks_are_recomputed_only_where_the_tool_chooses_alike(
    recompute, sizes, expected
) -> None:
    """Other blocks than the plan's are recomputed, or all."""
    plan = made(
        recompute=recompute, sizes=sizes, shard=2, level="optimizer", microbatches=1 + len(sizes)
    )
    if sizes == ():
        plan = made(recompute=recompute, shard=2, level="grads", microbatches=1)
    method, count, every = expected
    if method is None:
        with pytest.raises(ConfigError, match="choice"):
            export(plan, TOOLS["megatron"])
    else:
        found = flags(export(plan, TOOLS["megatron"]).text)
        assert (found.recompute_method, found.recompute_num_layers) == (method, count)
    if every is not None:
        table = tomllib.loads(export(plan, TOOLS["torchtitan"]).text)
        assert table["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": every}
    elif method == "block":
        with pytest.raises(ConfigError, match="choice"):
            export(plan, TOOLS["torchtitan"])


# Of 1F1B, torch draws a picture alone, with microbatches that there are not on the last rank.
@pytest.mark.parametrize("name", ["gpipe", "interleaved", "dualpipe-v"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_torchs_schedule_of_that_name_plays_the_plans_actions(name, pp, microbatches) -> None:
    """A schedule of another order under the name that is written."""
    order, called = ORDERS[name], TOOLS["torchtitan"].orders[name]
    mine = [stage for stage, held in enumerate(order.placements(pp)) if held == (0,)]
    stages = [
        mock.Mock(stage_index=stage, group_rank=0, group_size=pp, num_stages=pp * order.chunks)
        for stage in mine
    ]
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    runtime = schedules._PipelineScheduleRuntime
    with mock.patch.object(runtime, "_prepare_schedule_with_comms"):
        made_of = stages if order.chunks > 1 else stages[0]
        schedule = schedules.get_schedule_class(called)(made_of, microbatches, loss_fn=print)
    rows = schedule.pipeline_order if order.chunks > 1 else schedule._get_pipeline_order()
    theirs = [
        [
            (kinds[part.computation_type.name], part.stage_index, part.microbatch_index)
            for action in rows[rank]
            if action is not None
            for part in (action.sub_actions or (action,))
            if part.computation_type.name in kinds
        ]
        for rank in range(pp)
    ]
    ours = order.actions(pp, microbatches, Costs.equal(pp * order.chunks))
    assert theirs == [[(each.kind, each.stage, each.microbatch) for each in row] for row in ours]


@pytest.mark.parametrize("level", ["none", "optimizer", "grads", "params"])
def test_deepspeed_is_not_told_fp32_gradients_beside_bf16_without_zero(level: str) -> None:
    """DeepSpeed 0.19 raises NotImplementedError at such a configuration."""
    table = json.loads(export(made(shard=2, level=level), TOOLS["deepspeed"]).text)
    whole = level == "none"
    assert table["bf16"]["enabled"] == (not whole)
    assert table.get("torch_autocast", {}).get("dtype") == ("bfloat16" if whole else None)
    assert ("data_types" in table) == ("communication_data_type" in table) == (not whole)
    fp32 = json.loads(export(made(shard=2, level=level, precision="fp32"), TOOLS["deepspeed"]).text)
    assert not fp32["bf16"]["enabled"]
    assert not {"torch_autocast", "data_types"} & set(fp32)


@pytest.mark.parametrize("tp", [1, 2])
def test_deepspeed_is_told_no_batch_that_it_would_check_without_tensor_parts(tp: int) -> None:
    """Its configuration knows no tensor parts yet when it checks the product of all ranks."""
    exported = export(made(shard=2, tp=tp, level="grads"), TOOLS["deepspeed"])
    assert ("train_batch_size" in json.loads(exported.text)) == (tp == 1)
    assert any("tensor parts" in note for note in exported.notes) == (tp > 1)


@pytest.mark.parametrize("level", ["none", "grads", "params"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_accelerates_script_is_told_to_shard_gradients_over_passes(level, microbatches) -> None:
    """Whole gradients at a level that shards them: what `accumulate` does from 1.11 on."""
    exported = export(made(shard=2, level=level, microbatches=microbatches), TOOLS["accelerate"])
    said = any("num_steps=4, sync_each_batch=True" in note for note in exported.notes)
    assert said == (level != "none" and microbatches > 1)


@pytest.mark.parametrize("shard", [1, 2])
def test_accelerates_script_is_told_not_to_cut_the_model_over_all_processes(shard: int) -> None:
    """transformers cuts over all processes, beside which Accelerate finds another tp_size."""
    notes = export(made(shard=shard, tp=2, level="grads"), TOOLS["accelerate"]).notes
    assert any("tp_plan" in note for note in notes)
    assert any("device_mesh" in note for note in notes) == (shard > 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"shard": 2, "level": "params", "tp": 2}, "other than 1"),
        ({"tp": 2}, "to be 1"),
        ({"shard": 2, "level": "optimizer"}, ""),
    ],
)
def test_megatrons_script_is_told_of_connections_that_it_asserts(how, said) -> None:
    """Its `validate_args` ends where CUDA_DEVICE_MAX_CONNECTIONS is another."""
    notes = " ".join(export(made(**how), TOOLS["megatron"]).notes)
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in notes) == bool(said)
    assert said in notes


def test_deepspeeds_stages_are_dealt_evenly() -> None:
    assert uniform(10, 4) == (3, 3, 2, 2)
    assert sum(uniform(34, 8)) == 34


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_every_tool_says_its_version_and_orders_that_there_are(tool) -> None:
    assert tool.version
    assert tool.title
    assert set(tool.orders) <= set(ORDERS)
