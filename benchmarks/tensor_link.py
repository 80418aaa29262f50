"""Two tensor parts behind a slow link: what sums of gradients beside those of weights save.

    python benchmarks/tensor_link.py [--mbit 200] [--blocks 4] [--turns 8]

As root: each process is in a network namespace, whose way out tbf limits. Blocks of a Llama (512
wide, 4 samples of 512 tokens, float32) go forward and backward; passes in which sums run beside
(`beside`) and in which each is waited for where it is asked for (`waited`) take turns in one run,
two passes each, of which the second counts. Seconds are medians on the first process; `silent` are
the same passes of parts that exchange nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from convex_network import places

from polyreme.data import objective
from polyreme.graph.options import Transformers
from polyreme.measure.silent import Silent
from polyreme.runtime.apply.tensor import Tp, split
from polyreme.runtime.timing import Traffic

SAMPLES, TOKENS, WIDTH = 4, 512, 512
WAYS = ("beside", "waited", "silent")


def blocks(tp: Tp, n_blocks: int, *, beside: bool) -> list[torch.nn.Module]:
    """Blocks of this part; the entries of regions leave no weight for later unless `beside`."""
    config = {
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": n_blocks,
        "num_attention_heads": 8,
        "max_position_embeddings": TOKENS,
    }
    graph = Transformers(model_type="llama", config=config).graph(
        objective.sample("next", TOKENS, 64)
    )
    module: Any = sys.modules[split.__module__]
    products, found = module.products, []
    if not beside:
        module.products = lambda *_: []
    for layer in graph.layers:
        if layer.kind == "block":
            made = graph.build(layer.name).to_empty(device="cpu")
            graph.initialise(layer.name, made, 0)
            plan = graph.tensor_plan(layer.name)
            assert plan is not None
            split(made, plan, tp)
            found.append(made)
    module.products = products
    return found


def passes(modules: list[torch.nn.Module], sp: bool) -> tuple[float, float]:
    """Seconds forward and backward."""
    n_tokens = TOKENS // 2 if sp else TOKENS
    hidden = torch.randn(SAMPLES, n_tokens, WIDTH, requires_grad=True)
    begun_s = time.perf_counter()
    out = hidden
    for module in modules:
        out = module(out)
        module.zero_grad()
    there_s = time.perf_counter()
    out.sum().backward()
    return there_s - begun_s, time.perf_counter() - there_s


def part(n_blocks: int, turns: int) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for sp in (False, True):
        given = {"rank": rank, "degree": 2, "group": dist.group.WORLD, "sp": sp}
        made = {
            way: blocks(
                Tp(traffic=Silent() if way == "silent" else Traffic(), **given),
                n_blocks,
                beside=way == "beside",
            )
            for way in (WAYS if not sp else WAYS[:2])
        }
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in made}
        for turn in range(turns):
            for way in sorted(made, reverse=turn % 2 == 1):
                for counts in (False, True):  # the first may meet what another has left behind
                    dist.barrier()
                    found = passes(made[way], sp)
                    if counts:
                        seconds[way].append(found)
        if rank == 0:
            for way, own in seconds.items():
                forward_s, backward_s = (statistics.median(each) for each in zip(*own, strict=True))
                print(f"| {'yes' if sp else 'no'} | {way} | {forward_s:.3f} | {backward_s:.3f} |")
    dist.destroy_process_group()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    if "RANK" in os.environ:
        part(given.blocks, given.turns)
        return
    print(f"2 processes, {given.mbit:g} Mbit/s, {given.blocks} blocks, {given.turns} turns\n")
    print("| tokens split | sums | forward s | backward s |\n|---|---|---|---|", flush=True)
    with places(given.mbit) as there:
        common = {"MASTER_ADDR": there[0][1], "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
        common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        running = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *sys.argv],
                env={**os.environ, **common, "RANK": str(rank)},
            )
            for rank, (name, _) in enumerate(there[:2])
        ]
        try:
            codes = [each.wait() for each in running]
        finally:
            for each in running:
                each.terminate()  # one that is left would wait for the other
    if any(codes):
        raise SystemExit(f"a process ended with {codes}")


if __name__ == "__main__":
    main()
