"""Memory that a robust aggregate takes on a rank: it falls as replicas are split.

python benchmarks/aggregation_memory.py [--replicas 3] [--hidden 512]

ByzSGDnm between replicas of a small Llama on processes of this machine, with a geometric median
and with the mean. `aggregate` is by how much the highest peak of any process is above that with
the mean.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from polyreme import api

SPEC = """
[model]
kind = "transformers"
model_type = "llama"
[model.config]
hidden_size = {hidden}
intermediate_size = {wide}
num_hidden_layers = 8
num_attention_heads = 8
max_position_embeddings = 64
vocab_size = 256

[data]
kind = "text"
path = "{text}"

[train]
steps = 3
global_batch = {batch}
seq_len = 32
precision = "fp32"

[cluster]
cpu_processes = {processes}

[data_parallel]
rule = {{ kind = "SNGD", lr = 0.1 }}
feedback = {{ kind = "WorkerMomentum", momentum = 0.9 }}
aggregate = {aggregate}

[parallel]
replica = {replicas}
{split}
"""
SPLITS = {
    "whole": (1, ""),
    "tp 2": (2, "tp = 2"),
    "shard 2": (2, 'shard = 2\nlevel = "params"'),
    "pp 2": (2, "pp = 2"),
    "tp 2, pp 2": (4, "tp = 2\npp = 2"),
}
MEDIAN, MEAN = '{ kind = "GeometricMedian", byzantine = 1 }', '{ kind = "Mean" }'


def peak_bytes(given: argparse.Namespace, home: Path, split: str, aggregate: str) -> int:
    """The highest peak of any process."""
    n, options = SPLITS[split]
    spec = home / "spec.toml"
    spec.write_text(
        SPEC.format(
            hidden=given.hidden,
            wide=given.hidden * 11 // 4,
            text=given.text.resolve(),
            batch=4 * given.replicas,
            processes=n * given.replicas,
            aggregate=aggregate,
            replicas=given.replicas,
            split=options,
        )
    )
    folder = home / f"{split}-{len(aggregate)}".replace(" ", "").replace(",", "-")
    api.train(spec, out=folder)
    events = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return max(int(event["memory_bytes"]) for event in events if event["kind"] == "step")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--text", type=Path, default=Path("README.md"))
    given = parser.parse_args()
    print("| replica | processes | aggregate, MiB |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as home:
        for split, (n, _) in SPLITS.items():
            median, mean = (peak_bytes(given, Path(home), split, a) for a in (MEDIAN, MEAN))
            more = (median - mean) / 2**20
            print(f"| {split} | {n * given.replicas} | {more:.0f} |", flush=True)


if __name__ == "__main__":
    main()
