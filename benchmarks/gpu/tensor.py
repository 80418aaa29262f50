"""Tensor parallelism over all devices: our plans against torch.distributed.tensor.parallel.

    python benchmarks/gpu/tensor.py [--model llama-1.3b --model llama-7b] [--devices N]
                                    [--compiled no|yes|both] [--most 64]

Ours splits tokens between the parts (sp) or does not, in microbatches by powers of two up to the
largest that fits. The peer is a loop by hand: a Llama of transformers, split by its own tensor
plan, in the same microbatches. Its weights are fp32 under autocast, as ours have fp32 masters; or
bf16 alone, optimizer states too, which takes half the bytes. All take steps of an equal batch. The
goal is twice the peer's tokens a second.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from bare import cells
from stand import (
    MODELS,
    RULE,
    STEPS,
    WARM,
    Noise,
    Setting,
    Stand,
    Timed,
    head,
    plans,
    setting,
    too_few,
)

from polyreme.cluster import accelerator as accelerators
from polyreme.errors import ConfigError, Infeasible
from polyreme.plan.options import Parallel
from polyreme.profile.record import Profile
from polyreme.runtime import mesh

GOAL = 2.0
Weights = Literal["fp32", "bf16"]


def ours(
    stand: Stand, asked: Setting, profile: Profile, sizes: list[int]
) -> Iterator[tuple[str, int, Timed]]:
    """Each way, up to the first microbatch that does not fit."""
    for sp in (False, True):
        for microbatch in sizes:
            split = Parallel(
                tp=asked.n_devices,
                sp=sp,
                pp=1,
                shard=1,
                replica=1,
                microbatch=microbatch,
                recompute="none",
            )
            try:
                plan = plans(asked, profile, split)[0]
            except (ConfigError, Infeasible) as error:
                found = Timed(why=str(error).splitlines()[0])
            else:
                found = stand.timed(asked, plan)
            yield f"ours{', sp' if sp else ''}", microbatch, found
            if not found.ran:
                break


def theirs(
    stand: Stand, asked: Setting, weights: Weights, sizes: list[int]
) -> Iterator[tuple[str, int, Timed]]:
    """The loop by hand, up to the first microbatch that does not fit."""
    for microbatch in sizes:
        found = stand.run(by_hand, asked, (weights, microbatch))
        yield f"torch, {weights}", microbatch, found
        if not found.ran:
            break


def by_hand(asked: Setting, weights: Weights, microbatch: int) -> Timed:
    """Steps of the loop on this process."""
    world = mesh.open(accelerators.detect())
    kind = world.device.type
    n = asked.global_batch // microbatch
    source = Noise(asked.model.sample)
    cast = torch.autocast(kind, torch.bfloat16) if weights == "fp32" else nullcontext()
    ends_s = []
    model = _split(asked, world, weights)
    optimizer = _optimizer(model)
    score = torch.compile(_score) if asked.compiled else _score
    for step in range(STEPS + WARM):
        for at in range(n):
            rows = torch.arange(at * microbatch, (at + 1) * microbatch).numpy()
            fields = {name: x.to(world.device) for name, x in source.train(rows).items()}
            with cast:
                logits = model(fields["input_ids"], use_cache=False).logits
                loss = score(logits, fields["labels"])
            (loss / n).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())  # a loop logs something
        world.accelerator.synchronize()
        if step >= WARM - 1:
            ends_s.append(time.perf_counter())
    step_s = statistics.median(b - a for a, b in itertools.pairwise(ends_s))
    peak_bytes = world.accelerator.peak_bytes()
    mesh.close(world)
    return Timed(step_s=step_s, peak_bytes=peak_bytes)


def _score(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _split(asked: Setting, world: mesh.World, weights: Weights) -> Any:
    """A Llama whose matrices are split as its library plans."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import AutoConfig, AutoModelForCausalLM

    styles = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }
    config = AutoConfig.for_model(asked.model.model_type, **asked.model.config)
    torch.manual_seed(0)  # what is not split is the same on all
    with torch.device(world.device):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            attn_implementation="sdpa",
            dtype=torch.float32 if weights == "fp32" else torch.bfloat16,
        )
    split = {f"model.{name}": styles[how] for name, how in config.base_model_tp_plan.items()}
    split["lm_head"] = styles["colwise_gather_output"]
    parallelize_module(model, init_device_mesh(world.device.type, (world.n_ranks,)), split)
    if asked.compiled:
        for layer in model.model.layers:
            layer.compile()
    return model


def _optimizer(model: Any) -> torch.optim.Optimizer:
    """AdamW; fused kernels take no split and whole tensors in one call."""
    from torch.distributed.tensor import DTensor

    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        groups[isinstance(parameter, DTensor)].append(parameter)
    return torch.optim.AdamW([{"params": each} for each in groups.values()], lr=RULE.lr, fused=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    llamas = tuple(name for name in MODELS if MODELS[name].model_type == "llama")
    parser.add_argument("--model", choices=llamas, action="append")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--compiled", choices=("no", "yes", "both"), default="both")
    parser.add_argument("--most", type=int, default=64, help="samples of a microbatch")
    given = parser.parse_args()
    print(head())
    n = given.devices or accelerators.detect().count()
    if why := too_few(n):
        print(why)
        return
    print("\n| model | who | microbatch | compiled | ms | tokens/s | of peak | GiB |")
    print("|---|---|---|---|---|---|---|---|")
    ways = {"no": (False,), "yes": (True,), "both": (False, True)}[given.compiled]
    best: dict[tuple[str, str], float] = {}
    with Stand() as stand:
        for name, compiled in itertools.product(given.model or ("llama-1.3b", "llama-7b"), ways):
            asked = replace(setting(name, n), compiled=compiled)
            batch = asked.global_batch
            sizes = [2**k for k in range(batch.bit_length()) if batch % 2**k == 0]
            sizes = [each for each in sizes if each <= given.most]
            profile, _ = stand.profile(asked)
            runs = itertools.chain(
                ours(stand, asked, profile, sizes),
                theirs(stand, asked, "fp32", sizes),
                theirs(stand, asked, "bf16", sizes),
            )
            for who, microbatch, found in runs:
                print(
                    f"| {name} | {who} | {microbatch} | {compiled} | {cells(asked, found)} |",
                    flush=True,
                )
                if found.ran:
                    key = name, who.removesuffix(", sp")
                    best[key] = min(best.get(key, found.step_s), found.step_s)
    for name, who in best:
        if who != "ours" and (name, "ours") in best:
            ratio = best[name, who] / best[name, "ours"]
            print(f"\n{name}: best of ours to best of {who}: {ratio:.2f} (goal: {GOAL:g})")


if __name__ == "__main__":
    main()
