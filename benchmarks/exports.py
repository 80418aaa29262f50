"""Plans as other tools' files, read by those tools: what they understand beside the plan.

    python benchmarks/exports.py write DIR       # with polyreme: 16 plans, each for every tool
    python benchmarks/exports.py TOOL DIR        # with the tool: reads what lies in DIR

`accelerate`: the file goes through the launcher's own reading of it, and what that hands to the
script into its plugins. `deepspeed`: as many processes as the plan has call
`deepspeed.initialize` with a small model (on processors; transformers is needed). `torchtitan`:
the file is parsed, and a small Llama of as many blocks is split as the trainer does it, for every
rank in turn, with torch's fake process group (triton is needed, for its imports). `megatron`: its
argument parser is in no package; values are put into the configurations of megatron-core by their
flags' names, which also says how many blocks a stage gets. Flags that are no fields there are
listed. DIR may be written with another interpreter: reading needs nothing of polyreme.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

SMALL = """
[model]
kind = "transformers"
model_type = "llama"
[model.config]
hidden_size = 512
intermediate_size = 1376
num_hidden_layers = 8
num_attention_heads = 8
[data]
kind = "tokens"
path = "tokens.bin"
vocab = 32000
[train]
steps = 1000
global_batch = 64
seq_len = 512
precision = "bf16"
"""
LARGE = """
model = { preset = "llama-7b" }
data = { kind = "tokens", path = "tokens.bin", vocab = 32000 }
train = { steps = 1000, global_batch = 64, seq_len = 2048, precision = "bf16" }
"""
PLANS: Mapping[str, tuple[str, int, str]] = {  # spec, devices, what is fixed
    "one-device": (SMALL, 1, "microbatch=8"),
    "replicas": (SMALL, 4, "replica=4 microbatch=4"),
    "replicas-fp32": (SMALL, 4, "replica=4 microbatch=4 train.precision=fp32"),
    "optimizer": (SMALL, 4, "shard=4 level=optimizer microbatch=16"),
    "optimizer-passes": (SMALL, 4, "shard=4 level=optimizer microbatch=4"),
    "grads": (SMALL, 4, "shard=4 level=grads microbatch=4"),
    "params": (LARGE, 4, "shard=4 level=params microbatch=2 recompute=all"),
    "replicas-of-shards": (LARGE, 8, "replica=2 shard=4 level=params microbatch=2 recompute=all"),
    "tensor": (SMALL, 4, "tp=2 sp=false shard=2 level=grads microbatch=4"),
    "tensor-alone": (SMALL, 4, "tp=4 sp=false microbatch=8"),
    "tensor-tokens": (LARGE, 8, "tp=4 sp=true shard=2 level=grads microbatch=2"),
    "1f1b": (LARGE, 8, "pp=4 shard=2 level=optimizer microbatch=2 recompute=all"),
    "1f1b-dealt": (
        SMALL,
        4,
        "pp=2 stages=[5,5] shard=2 level=optimizer microbatch=4 recompute=all",
    ),
    "1f1b-uneven": (SMALL, 4, "pp=2 stages=[4,6] shard=2 level=optimizer microbatch=4"),
    "1f1b-whole": (SMALL, 4, "pp=2 stages=[5,5] replica=2 microbatch=4"),
    "interleaved": (SMALL, 4, "pp=2 order=interleaved shard=2 level=optimizer microbatch=4"),
}
LEVELS = ("none", "optimizer", "grads", "params")
DTYPES = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "bfloat16": "bf16", "float32": "fp32"}
Facts = dict[str, Any]


def write(folder: Path) -> None:
    """Plan every case; its facts as JSON, and its files for all tools that do not refuse it."""
    from polyreme.errors import ConfigError
    from polyreme.plan import store
    from polyreme.plan.export import TOOLS, export
    from polyreme.plan.export.sketch import Sketch, sketch_of

    def facts(sketch: Sketch) -> Facts:
        plan = sketch.plan
        found = Facts(replica=sketch.replica, shard=sketch.shard, tp=sketch.tp, pp=sketch.pp)
        found |= Facts(world=sketch.world, data=sketch.data, sp=sketch.sp, level=sketch.level)
        found |= Facts(batch=plan.global_batch, seq=plan.seq_len, precision=plan.precision)
        found |= Facts(microbatch=sketch.microbatch, passes=plan.microbatches)
        found["recompute"] = sketch.recomputes
        found["layers"] = [len(stage.layers) for stage in plan.stages]
        found["blocks"] = [len(stage) for stage in sketch.blocks]
        return found

    folder.mkdir(parents=True, exist_ok=True)
    for name, (spec, devices, fixed) in PLANS.items():
        (folder / "spec.toml").write_text(spec)
        planned = folder / f"{name}.plan.json"
        command = [sys.executable, "-m", "polyreme", "plan", str(folder / "spec.toml")]
        command += ["--cluster", f"preset:{devices}xH100", "--assume", "--out", str(planned)]
        for each in fixed.split():
            command += ["--set", each if each.startswith("train.") else f"parallel.{each}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        plan = store.load(planned)
        sketch, _ = sketch_of(plan)
        assert sketch is not None
        (folder / f"{name}.facts.json").write_text(json.dumps(facts(sketch)))
        for tool in TOOLS.values():
            written = folder / f"{name}.{tool.name}"
            written.unlink(missing_ok=True)
            try:
                written.write_text(export(plan, tool).text)
            except ConfigError as error:
                print(f"{name}: {tool.name} refuses: {error.violations[0].rule}")


def accelerate(path: Path, _: Facts) -> Iterator[Facts]:
    """What `accelerate launch` makes of the file, and the plugins of what it hands on."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    args = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    args, *_rest = _validate_launch_command(args)
    several = args.use_fsdp or args.multi_gpu
    found = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    handed = {key: text for key, text in found.items() if re.search("FSDP|PARALLELISM", key)}
    with mock.patch.dict(os.environ, handed):
        yield _plugins(args)


def _plugins(args: argparse.Namespace) -> Facts:
    """What a script's Accelerator makes of its environment."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    said = Facts(world=args.num_processes, level="none", recompute="none")
    said["precision"] = {"no": "fp32"}.get(args.mixed_precision, args.mixed_precision)
    if args.use_fsdp:
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        if args.mixed_precision != "no":
            plugin.set_mixed_precision(args.mixed_precision)
            said["precision"] = DTYPES[str(plugin.mixed_precision_policy.param_dtype)]
        said["level"] = "params" if plugin.reshard_after_forward else ("optimizer", "grads")
        said["recompute"] = "all" if plugin.activation_checkpointing else "none"
    if args.use_parallelism_config:
        mesh = ParallelismConfig()
        state = {
            "num_processes": args.num_processes,
            "multi_device": True,
            "distributed_type": None,
        }
        mesh._validate_accelerator(SimpleNamespace(is_fsdp2=args.use_fsdp, **state))
        said["replica"], said["shard"] = mesh.dp_replicate_size, mesh.dp_shard_size
        said["tp"], said["world"] = mesh.tp_size, mesh.total_size
    return said


def _engine(rank: int, path: str, facts: Facts, said: str) -> None:
    """One of the processes: the engine that DeepSpeed makes of the file."""
    import deepspeed
    import torch
    from deepspeed.pipe import LayerSpec, PipelineModule
    from transformers import LlamaConfig, LlamaForCausalLM

    world = str(facts["world"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_SIZE=world)
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    if facts["pp"] > 1:
        layers = [LayerSpec(torch.nn.Linear, 8, 8) for _ in range(sum(facts["layers"]))]
        how = {"num_stages": facts["pp"], "partition_method": "uniform"}
        model = PipelineModule(layers, loss_fn=torch.nn.MSELoss(), **how)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    rule = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=rule, config=path)
    cast = engine.torch_autocast_dtype() if engine.torch_autocast_enabled() else None
    kept, grad_dtype = engine.get_data_types()
    assert {str(grad_dtype), str(engine.communication_data_type)} == {"torch.float32"}
    data, level = engine.dp_world_size, LEVELS[engine.zero_optimization_stage()]
    each, passes = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    found = Facts(data=data, tp=max(1, engine.autotp_size()), microbatch=each, passes=passes)
    found |= Facts(batch=each * passes * data, level=level, precision=DTYPES[str(cast or kept)])
    if facts["pp"] > 1:
        found["pp"] = engine.num_stages
        found["layers"] = [b - a for a, b in zip(model.parts, model.parts[1:], strict=False)]
        found["recompute"] = "all" if model.activation_checkpoint_interval == 1 else "none"
    Path(f"{said}.{rank}").write_text(json.dumps(found))


def deepspeed(path: Path, facts: Facts) -> Iterator[Facts]:
    """What the engine of every process holds."""
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    import torch.multiprocessing

    importlib.import_module("deepspeed")  # once, before the processes part
    args = (str(path), facts, f"{path}.said")
    torch.multiprocessing.start_processes(
        _engine, args=args, nprocs=facts["world"], start_method="fork"
    )
    for rank in range(facts["world"]):
        yield json.loads(Path(f"{path}.said.{rank}").read_text())


def torchtitan(path: Path, facts: Facts) -> Iterator[Facts]:
    """What every rank of the trainer makes of the file, without devices."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torchtitan.config import ConfigManager
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec

    parallel_dims.device_type = "cpu"
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    axes, training, spec = config.parallelism, config.training, get_train_spec()
    blocks: dict[int, int] = {}
    for rank in range(facts["world"]):
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=facts["world"]
        )
        dims = ParallelDims(
            dp_replicate=axes.data_parallel_replicate_degree,
            dp_shard=axes.data_parallel_shard_degree,
            cp=axes.context_parallel_degree,
            tp=axes.tensor_parallel_degree,
            pp=axes.pipeline_parallel_degree,
            ep=axes.expert_parallel_degree,
            etp=axes.expert_tensor_parallel_degree,
            world_size=facts["world"],
        )
        dims.build_mesh()
        data = dims.dp_replicate * dims.dp_shard
        sizes = {"dim": 64, "n_heads": 8, "vocab_size": 256, "max_seq_len": training.seq_len}
        args = TransformerModelArgs(n_layers=sum(facts["blocks"]), **sizes)
        with torch.device("meta"):
            model = spec.model_cls(args)
        microbatch = training.local_batch_size
        passes = training.global_batch_size // (microbatch * data)
        if dims.pp_enabled:
            assert passes == 1
            how = (dims, config, torch.device("cpu"), args, spec.parallelize_fn, print)
            schedule, parts, *_ = spec.pipelining_fn(model, *how)
            passes = schedule._n_microbatches
            microbatch = training.local_batch_size // passes
            stages = getattr(schedule, "_stages", None) or [schedule._stage]
            blocks |= {
                stage.stage_index: len(part.layers)
                for stage, part in zip(stages, parts, strict=True)
            }
        else:
            parts = [spec.parallelize_fn(model, dims, config)]
            blocks = {0: len(model.layers)}
        found = [block for part in parts for block in part.layers.values()]
        kept = {"CheckpointWrapper" in type(block).__name__ for block in found}
        said = Facts(replica=dims.dp_replicate, shard=dims.dp_shard, data=data, level="none")
        said |= Facts(tp=dims.tp, pp=dims.pp, sp=dims.tp > 1, seq=training.seq_len)
        said |= Facts(microbatch=microbatch, passes=passes, batch=microbatch * passes * data)
        said["precision"] = DTYPES[training.mixed_precision_param]
        said["recompute"] = "all" if kept == {True} else "none" if kept == {False} else "some"
        if isinstance(found[0], FSDPModule):
            group = found[0]._get_fsdp_state()._fsdp_param_group
            resharded = group.post_forward_mesh_info is not None
            said["level"] = "params" if resharded else ("optimizer", "grads")
            said["precision"] = DTYPES[str(group.mp_policy.param_dtype)]
            assert group.mp_policy.reduce_dtype == torch.float32
        if len(blocks) == len(facts["blocks"]):
            said["blocks"] = [blocks[stage] for stage in sorted(blocks)]
        torch.distributed.destroy_process_group()
        yield said


def megatron(path: Path, _: Facts) -> Iterator[Facts]:
    """What megatron-core's configurations take of the flags, on every pipeline rank."""
    from dataclasses import fields

    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    text = path.read_text()
    match = re.search(r"^PLAN_WORLD_SIZE=(\d+)\nPLAN_ARGS=\((.*)\)$", text, re.M | re.S)
    assert match is not None
    words, flags = shlex.split(match[2]), {}
    for index, word in enumerate(words):
        if word.startswith("--"):
            following = [*words[index + 1 :], "--"][0]
            value: Any = True if following.startswith("--") else following
            flags[word[2:].replace("-", "_")] = int(value) if str(value).isdigit() else value
    flags |= {
        f"num_layers_in_{end}_pipeline_stage": flags.pop(f"decoder_{end}_pipeline_num_layers")
        for end in ("first", "last")
        if f"decoder_{end}_pipeline_num_layers" in flags
    }
    chunks = 1
    if "num_layers_per_virtual_pipeline_stage" in flags:  # as validate_args of its scripts
        each = flags.pop("num_layers_per_virtual_pipeline_stage")
        chunks = flags["num_layers"] // flags["pipeline_model_parallel_size"] // each
        flags["virtual_pipeline_model_parallel_size"] = chunks

    def of(kind: type) -> dict[str, Any]:
        names = {field.name for field in fields(kind)}
        return {name: value for name, value in flags.items() if name in names}

    shape = {"hidden_size": 64, "num_attention_heads": 8, "pipeline_dtype": "bf16"}
    config = TransformerConfig(**shape, **of(TransformerConfig))
    spread = DistributedDataParallelConfig(**of(DistributedDataParallelConfig))
    taken = {*of(TransformerConfig), *of(DistributedDataParallelConfig)}
    print(f"  no fields of megatron-core: {', '.join(sorted(set(flags) - taken))}")
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    data = int(match[1]) // (tp * pp)
    batch, microbatch = flags["global_batch_size"], flags["micro_batch_size"]
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, batch, microbatch, data, False)
    if config.pipeline_model_parallel_layout is not None:
        chunks = config.virtual_pipeline_model_parallel_size or 1
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)
    blocks = []
    for stage in range(pp * chunks):
        parallel_state.set_pipeline_model_parallel_rank(stage % pp)
        part = stage // pp if chunks > 1 else None
        blocks.append(get_num_layers_to_build(config, vp_stage=part, pp_rank=stage % pp))
    strategies = {"optim_grads": "grads", "optim_grads_params": "params"}
    level = "optimizer" if flags.get("use_distributed_optimizer") else "none"
    if spread.use_megatron_fsdp:
        level = strategies[spread.data_parallel_sharding_strategy]
    said = Facts(world=int(match[1]), data=data, tp=tp, pp=pp, batch=batch, level=level)
    said |= Facts(microbatch=microbatch, passes=calculator.get_num_microbatches(), blocks=blocks)
    said |= Facts(seq=flags["seq_length"], sp=config.sequence_parallel)
    said["replica"] = data if level == "none" else spread.num_distributed_optimizer_instances
    said["precision"] = "bf16" if config.bf16 else "fp32"
    said["recompute"] = "all" if config.recompute_granularity == "full" else "none"
    yield said


READERS: Mapping[str, Callable[[Path, Facts], Iterator[Facts]]] = {
    each.__name__: each for each in (accelerate, deepspeed, torchtitan, megatron)
}


def read(tool: str, folder: Path) -> int:
    """Beside each plan, what the tool says of it that the plan does not; how many do."""
    wrong = 0
    for name in PLANS:
        written = folder / f"{name}.{tool}"
        if not written.exists():
            print(f"{name}: refused")
            continue
        facts = json.loads((folder / f"{name}.facts.json").read_text())
        found: list[str] = []
        compared: set[str] = set()
        try:
            for said in READERS[tool](written, facts):
                compared |= set(said)
                found += [
                    f"{key} is {value}, in the plan {facts[key]}"
                    for key, value in said.items()
                    if facts[key] not in (value if isinstance(value, tuple) else (value,))
                ]
        except Exception as error:  # whatever the tool raises is what is looked for
            found.append(f"{type(error).__name__}: {str(error).strip()[-300:]}")
        wrong += bool(found)
        told = "; ".join(dict.fromkeys(found)) or f"as planned: {', '.join(sorted(compared))}"
        print(f"{name}: {told}", flush=True)
    return wrong


def main() -> None:
    """Write plans, or read them with a tool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tool", choices=["write", *READERS])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.tool == "write":
        write(args.folder)
    else:
        sys.exit(min(read(args.tool, args.folder), 1))


if __name__ == "__main__":
    main()
