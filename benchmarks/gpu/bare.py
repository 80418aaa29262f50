"""Loops as they are written by hand: torch, a Llama of transformers, fused AdamW, bf16.

    python benchmarks/gpu/bare.py [--model llama-1.3b] [--microbatch 8 --microbatch 16]

`fsdp2` shards each block, in mixed precision; `ddp` (and, on one device, nothing around it) keeps
float32 weights and computes under autocast. `compiled` compiles blocks, and the loss with the head.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from peak import share
from stand import MODELS, STEPS, WARM, Noise, Setting, Stand, Timed, beside_bytes, setting, where

from polyreme.cluster import accelerator as accelerators
from polyreme.runtime import mesh

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from polyreme.runtime.mesh import World

Kind = Literal["fsdp2", "ddp"]
KINDS: tuple[Kind, ...] = ("fsdp2", "ddp")


def timed(
    stand: Stand,
    asked: Setting,
    *,
    kind: Kind,
    microbatch: int,
    recompute: bool = False,
    steps: int = STEPS,
) -> Timed:
    """A loop over microbatches of so many samples, until the global batch is through."""
    return stand.run(loop, asked, (kind, microbatch, recompute, steps))


def timed_all(stand: Stand, asked: Setting, many: Sequence[tuple[Kind, int, bool]]) -> list[Timed]:
    """The same of each kind, microbatch, and whether it recomputes."""
    return stand.run_all(loop, asked, [(*each, STEPS) for each in many])


def loop(
    asked: Setting,
    kind: Kind,
    microbatch: int,
    recompute: bool,
    steps: int,
    at_end: Callable[[], None] | None = None,
) -> Timed:
    """The loop in this process; `at_end` is called after each step."""
    world = mesh.open(accelerators.detect())
    n = asked.global_batch // (world.n_ranks * microbatch)
    if n * world.n_ranks * microbatch != asked.global_batch:
        return Timed(why=f"{microbatch} does not divide the batch")
    model = _model(asked, world, kind, recompute)
    found = _steps(asked, world, model, n, steps, at_end)
    mesh.close(world)
    return found


def _steps(
    asked: Setting,
    world: World,
    model: torch.nn.Module,
    n: int,
    steps: int,
    at_end: Callable[[], None] | None,
) -> Timed:
    microbatch = asked.global_batch // (world.n_ranks * n)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    source = Noise(asked.model.sample)
    ends_s = []
    for step in range(steps + WARM):
        for _ in range(n):
            rows = torch.randint(0, 1000, (microbatch,)).numpy()
            fields = {name: x.to(world.device) for name, x in source.train(rows).items()}
            (model(fields["input_ids"], fields["labels"]) / n).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(norm)  # a loop logs something
        if step >= WARM - 1:
            ends_s.append(time.perf_counter())
        if at_end is not None:
            at_end()
    step_s = statistics.median(b - a for a, b in itertools.pairwise(ends_s))
    n_bytes = world.accelerator.peak_bytes() + beside_bytes(world.accelerator)
    return Timed(step_s=step_s, peak_bytes=n_bytes)


class _Scored(torch.nn.Module):
    """A causal language model with its loss, under autocast where weights stay in float32."""

    def __init__(self, model: Any, device_type: str, cast: bool) -> None:
        super().__init__()
        self.model, self.device_type, self.cast = model, device_type, cast

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.cast):
            hidden = self.model.model(input_ids, use_cache=False).last_hidden_state
            return self.score(hidden, labels)

    def score(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model.lm_head(hidden).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _model(asked: Setting, world: World, kind: Kind, recompute: bool) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(asked.model.model_type, **asked.model.config)
    with torch.device(world.device):
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    layers = model.model.layers
    for at, layer in enumerate(layers):
        if recompute:
            layers[at] = checkpoint_wrapper(layer)
        if asked.compiled:
            layers[at].compile()
    scored = _Scored(model, world.device.type, cast=kind == "ddp")
    if asked.compiled:
        scored.score = torch.compile(scored.score)  # type: ignore[method-assign]
    if kind == "ddp":
        if world.n_ranks == 1:
            return scored
        return torch.nn.parallel.DistributedDataParallel(scored)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            world.accelerator.backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = init_device_mesh(world.device.type, (world.n_ranks,))
    for layer in layers:
        fully_shard(layer, mesh=where, mp_policy=policy)
    # The head is called from outside of the model: its root is what both are in.
    fully_shard(scored, mesh=where, mp_policy=policy)
    return scored


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), action="append")
    parser.add_argument("--microbatch", type=int, action="append")
    parser.add_argument("--devices", type=int)
    given = parser.parse_args()
    print(where())
    print("| model | loop | microbatch | compiled | recompute | ms | tokens/s | of peak | GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    with Stand() as stand:
        for name in given.model or ("llama-1.3b", "llama-7b"):
            for kind, compiled, recompute in itertools.product(KINDS, (False, True), (False, True)):
                for microbatch in given.microbatch or (1, 2, 4, 8, 16):
                    asked = setting(name, given.devices, compiled=compiled)
                    found = timed(
                        stand, asked, kind=kind, microbatch=microbatch, recompute=recompute
                    )
                    print(
                        f"| {name} | {kind} | {microbatch} | {compiled} | {recompute} | "
                        f"{cells(asked, found)} |",
                        flush=True,
                    )


def cells(asked: Setting, found: Timed) -> str:
    """Milliseconds, tokens (or samples) a second, share of the peak, GiB; or why there are none."""
    if not found.ran:
        return f"{found.why} | - | - | -"
    rate = asked.global_batch * (asked.model.seq_len or 1) / found.step_s
    return (
        f"{1e3 * found.step_s:.1f} | {rate:,.0f} | {100 * share(asked, found.step_s):.1f} % | "
        f"{found.peak_bytes / 2**30:.1f}"
    )


if __name__ == "__main__":
    main()
