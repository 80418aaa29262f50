"""Published rankings of hand-made strategies on domestic accelerators, beside predictions.

python benchmarks/rankings.py --data tables.json [--only dcu|ascend]

The file holds the tables `dcu_megatron` (Megatron on 2 x 8 Hygon DCU, Qwen3-8B, tokens/s a device)
and `uniap_ascend910a` (2 and 4 x 8 Ascend 910A, samples/s, model and length not stated). Predicted
from presets alone: assumed profiles, one strategy for all layers, stages of as many layers each,
1F1B, gradients all-reduced. Devices that give no peak in bf16 are taken at that of fp16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from scipy.stats import kendalltau, spearmanr

from polyreme.cluster.parse import parse
from polyreme.cluster.types import Cluster
from polyreme.graph.options import Preset
from polyreme.plan.degrees import refused_tp
from polyreme.plan.ir import Workload
from polyreme.plan.order import ORDERS
from polyreme.plan.play import Costs
from polyreme.planner.draft import Draft, Strategy
from polyreme.planner.search import price
from polyreme.planner.space import write_plan
from polyreme.planner.stages import balanced
from polyreme.profile.assume import assume
from polyreme.sample import SampleSpec, TensorSpec

LENGTH = 4096  # tokens of a sample where the source gives none
CANDIDATES = {  # presets and lengths that may be behind a table that names none
    "bert-huge": (512,),
    "t5-large": (512,),
    "vit-huge": (0,),
    "swin-huge": (0,),
    "llama-7b": (512, 1024, 2048, 4096),
    "llama-13b": (512, 1024, 2048, 4096),
    "llama3-8b": (1024, 2048, 4096),
    "qwen3-8b": (1024, 2048, 4096),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy with its throughput as published; None where it ran out of memory."""

    tp: int
    pp: int
    dp: int
    cp: int = 1
    batch: int
    measured: float | None

    def __str__(self) -> str:
        cp = f" cp {self.cp}" if self.cp > 1 else ""
        return f"tp {self.tp} pp {self.pp} dp {self.dp}{cp}"


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Predicted samples per second, and how full the fullest device is."""

    samples_s: float
    full: float


class Bench:
    """A model at one length on one cluster."""

    def __init__(self, preset: str, length: int, cluster: str) -> None:
        self._graph = Preset(preset=preset).graph(sample(length))
        self._cluster = in_bf16(parse(cluster, "cluster"))
        self._profile = assume(self._graph, self._cluster, "bf16")
        self._length = length

    def price(self, row: Row, *, sp: bool, recompute: bool) -> Priced | None:
        """A row's prediction; None if the model cannot be split so."""
        graph = self._graph
        if refused_tp(graph, row.tp) is not None:
            return None
        each = Strategy(
            replica=row.dp, cp=row.cp, tp=row.tp, sp=sp and row.tp > 1, recompute=recompute
        )
        names = [layer.name for layer in graph.layers]
        sizes = balanced([1.0] * len(names), row.pp)
        cuts = [sum(sizes[:stage]) for stage in range(row.pp + 1)]
        several = row.pp > 1
        microbatches = row.batch // row.dp
        order = ORDERS["1f1b"]
        draft = Draft(
            strategies=dict.fromkeys(names, each),
            pp=row.pp,
            order=order.name if several else "",
            stages=tuple(tuple(names[cuts[s] : cuts[s + 1]]) for s in range(row.pp))
            if several
            else (),
            holders=order.placements(row.pp) if several else ((0,),),
            actions=order.actions(row.pp, microbatches, Costs.equal(row.pp)) if several else (),
            microbatches=microbatches,
            global_batch=row.batch,
            bucket_bytes=2**25,
            overlap=True,
        )
        workload = Workload(
            global_batch=draft.global_batch,
            seq_len=self._length or 1,
            precision="bf16",
            optimizer_states=2,
        )
        plan = write_plan(draft, workload)
        estimate = price(graph, self._cluster, self._profile, workload, plan).estimate
        assert estimate is not None
        have = min(kind.memory_bytes for kind in self._cluster.device_types.values())
        need = sum(estimate.peak_bytes.values())
        return Priced(samples_s=row.batch / estimate.step_s, full=need / have)


def sample(length: int) -> SampleSpec:
    """Texts and their pairs of so many tokens; images without."""
    if length == 0:
        pixels = {"pixel_values": TensorSpec((3, 224, 224), "float32")}
        return SampleSpec(fields={**pixels, "labels": TensorSpec((), "int64")}, n_classes=1000)
    names = ("input_ids", "decoder_input_ids", "labels")
    tokens = TensorSpec((length,), "int64")
    return SampleSpec(fields=dict.fromkeys(names, tokens), n_classes=30000)


def in_bf16(cluster: Cluster) -> Cluster:
    """The cluster, with fp16's peak standing for bf16's where a device has none."""
    kinds = {
        name: msgspec.structs.replace(
            kind,
            peak_flops={"bf16": kind.peak_flops.get("fp16", 0.0), **kind.peak_flops},
        )
        for name, kind in cluster.device_types.items()
    }
    return msgspec.structs.replace(cluster, device_types=kinds)


def correlation(measured: Sequence[float], predicted: Sequence[float]) -> str:
    """Rank correlations, from -1 to 1."""
    rho = spearmanr(measured, predicted).statistic
    tau = kendalltau(measured, predicted).statistic
    return f"Spearman {rho:.2f}, Kendall {tau:.2f}"


def dcu(table: Mapping[str, Any]) -> Iterator[str]:
    """Each row measured and predicted; best, worst and rank correlation."""
    rows = [
        Row(**dict(zip(table["columns"][:4], row[:4], strict=True)), batch=256, measured=row[4])
        for row in table["rows"]
    ]
    bench = Bench("qwen3-8b", LENGTH, "preset:2x8xDCU-BW1000")
    yield "strategy measured_tokens_s predicted_tokens_s full"
    found = []
    for row in rows:
        priced = bench.price(row, sp=True, recompute=False)
        assert priced is not None
        assert row.measured is not None
        n_devices = row.tp * row.pp * row.dp * row.cp
        tokens_s = priced.samples_s * LENGTH / n_devices
        found.append((row, row.measured, tokens_s))
        yield f"{row}: {row.measured:.2f} {tokens_s:.1f} {priced.full:.0%}"
    for which, pick in (("best", max), ("worst", min)):
        by_them, by_us = (pick(found, key=lambda each, at=at: each[at])[0] for at in (1, 2))
        yield f"{which}: measured {by_them}; predicted {by_us}"
    plain = [each for each in found if each[0].cp == 1]
    for which, those in (("all rows", found), ("rows without cp", plain)):
        yield f"{which}: {correlation([each[1] for each in those], [each[2] for each in those])}"


def ascend(table: Mapping[str, Any]) -> Iterator[str]:
    """For each model and length, whether memory, order and ratios agree with all rows."""
    columns = table["columns"]
    groups: dict[int, list[Row]] = {}
    for values in table["rows"]:
        row = dict(zip(columns, values, strict=True))
        groups.setdefault(row["devices"], []).append(
            Row(
                tp=row["tp"],
                pp=row["pp"],
                dp=row["dp"],
                batch=row["global_batch"],
                measured=row["throughput"],
            )
        )
    yield "model length sp recompute memory_agrees order_agrees ratio_of_speeds"
    for preset, lengths in CANDIDATES.items():
        for length in lengths:
            benches = {n: Bench(preset, length, f"preset:{n // 8}x8xAscend-910A") for n in groups}
            for sp in (False, True):
                for recompute in (False, True):
                    said = _agreement(groups, benches, sp=sp, recompute=recompute)
                    how = f"{'sp' if sp else 'no'} {'all' if recompute else 'none'}"
                    yield f"{preset} {length} {how} {said}"


def _agreement(
    groups: Mapping[int, list[Row]], benches: Mapping[int, Bench], *, sp: bool, recompute: bool
) -> str:
    memory, order, ratios, n_rows, n_pairs = 0, 0, [], 0, 0
    for n_devices, rows in groups.items():
        timed = []
        for row in rows:
            priced = benches[n_devices].price(row, sp=sp, recompute=recompute)
            if priced is None:
                return "cannot be split so"
            n_rows += 1
            memory += (priced.full <= 1) == (row.measured is not None)
            if row.measured is not None:
                timed.append((row.measured, priced.samples_s))
                ratios.append(priced.samples_s / row.measured)
        for index, (measured, predicted) in enumerate(timed):
            for other, theirs in timed[index + 1 :]:
                n_pairs += 1
                order += (measured > other) == (predicted > theirs)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{memory}/{n_rows} {order}/{n_pairs} {spread}"


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the published tables")
    parser.add_argument("--only", choices=("dcu", "ascend"))
    arguments = parser.parse_args()
    tables = {each["id"]: each for each in json.loads(arguments.data.read_text())["tables"]}
    if arguments.only != "ascend":
        for line in dcu(tables["dcu_megatron"]):
            print(line, flush=True)
    if arguments.only != "dcu":
        for line in ascend(tables["uniap_ascend910a"]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
