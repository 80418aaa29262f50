"""Profiles that Galvatron's profiler wrote, read as ours.

Its files hold the forward milliseconds of one repeated layer kind and of all other layers together,
megabytes of what a sample leaves for its backward pass, and bandwidths of collectives. A backward
pass is taken as two forward passes, as its search does; so what is read counts as assumed. While a
collective runs beside computation each takes `overlap_coe` as long, which leaves
``overlap_coe - 1`` of the collective exposed. It has no time for updates, and no context's memory.

Source of the format: Miao et al., "Galvatron", VLDB 2023; files of Hetu-Galvatron 2.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cluster.types import Cluster
from ..errors import ConfigError, Violation
from ..graph.layer import Layer, LayerGraph
from .record import Collective, CollectiveTimes, LayerTimes, Profile
from .store import made_now

PREFIX = "galvatron:"
BACKWARD = 2  # forward passes that a backward pass takes
MODEL_TOLERANCE = 0.03  # of a layer's parameter bytes: measured ones hold rounding of allocations
MIB = 2**20
_SIZES_MIB = tuple(2**power for power in range(11))
_HALF: tuple[Collective, ...] = ("all_gather", "reduce_scatter")

_Entries = Mapping[str, Any]


def read_galvatron(text: str, graph: LayerGraph, cluster: Cluster, precision: str) -> Profile:
    """The profile in files and folders named ``galvatron:PATH[,PATH]``, the first that has it.

    Raises:
        ConfigError: a file or an entry is missing, or was made for another model, number of
            tokens or precision; names it.
    """
    files = _files(text)
    compute = _one(files, f"computation_profiling_{precision}_", text, "layertype_0_")
    memory = _one(files, f"memory_profiling_{precision}_", text, "layertype_0")
    coefficient = _one(files, "overlap_coefficient", text, "overlap_coe")
    repeated, others = _kinds(graph)
    seq_len = _tokens(graph, text)
    held, first, last = _held(memory, str(seq_len), text)
    _same_model(repeated, held, text)
    forward_s = {"layertype_0": _times(compute, "0", seq_len, text)}
    forward_s["other"] = _times(compute, "other", seq_len, text)
    activation = held["tp_activation_per_bsz_dict"]
    layers = {
        repeated.kind: _layer_times(
            forward_s["layertype_0"], activation["1"], activation["checkpoint"]
        )
    }
    for layer in others:
        is_last = layer.name == graph.output.rpartition(".")[0]
        kept = max(0.0, last - _logits_mib(layer)) if is_last else first
        kept = kept if is_last or layer is graph.layers[0] else 0.0
        rows = forward_s["other"] if is_last else dict.fromkeys(forward_s["other"], 0.0)
        layers[layer.kind] = _layer_times(rows, kept, kept)
    sizes = forward_s["layertype_0"]
    return Profile(
        layers=layers,
        collectives=_collectives(files, cluster, text),
        optimizer_s_per_byte=0.0,
        matmul_flops=max(repeated.flops * size / seconds for size, seconds in sizes.items()),
        overlap=max(0.0, 2.0 - float(coefficient["overlap_coe"])),
        context_bytes=0,
        assumed=True,
        **made_now(graph, cluster, precision),
    )


def _files(text: str) -> list[Path]:
    found: list[Path] = []
    for part in filter(None, text.removeprefix(PREFIX).split(",")):
        path = Path(part)
        if not path.exists():
            raise _refused(text, f"has no {part}", "folders or files of Galvatron's profiler")
        found += sorted(path.glob("*.json")) if path.is_dir() else [path]
    return found


def _one(files: Sequence[Path], name: str, text: str, entry: str) -> _Entries:
    """Entries of the file of that name that has such an entry; the first of them."""
    for path in files:
        if name in path.name:
            found = _loaded(path, text)
            if any(key.startswith(entry) for key in found):
                return found
    raise _refused(text, f"has no {name}*.json with {entry}*", "a profile with that file")


def _loaded(path: Path, text: str) -> _Entries:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _refused(text, f"has {path.name}, which cannot be read: {error}", "JSON") from error
    if not isinstance(found, dict):
        raise _refused(text, f"has {path.name}, which holds no entries", "a JSON object")
    return found


def _kinds(graph: LayerGraph) -> tuple[Layer, list[Layer]]:
    """One layer of the kind that there is most of, and one of each other kind."""
    counts = Counter(layer.kind for layer in graph.layers)
    (usual, _), *_ = counts.most_common(1)
    firsts = {layer.kind: layer for layer in reversed(graph.layers)}
    return firsts.pop(usual), list(firsts.values())


def _tokens(graph: LayerGraph, text: str) -> int:
    tokens = graph.inputs.get("input_ids")
    if tokens is None:
        raise _refused(text, "is read for language models only", "a model that reads tokens")
    return int(tokens.shape[0])


def _held(memory: _Entries, seq_len: str, text: str) -> tuple[_Entries, float, float]:
    """A layer's entries, and MiB a sample of the first and of the last of the other layers."""

    def of(name: str) -> Any:
        found = memory.get(f"{name}_sp", memory.get(name))
        if not isinstance(found, dict):
            raise _refused(text, f"has no {name} among what memory was measured", "a whole profile")
        if seq_len not in found:
            lengths = ", ".join(found)
            raise _refused(text, f"was made for {lengths} tokens, not {seq_len}", lengths)
        return found[seq_len]

    first, last = (
        float(of(f"other_memory_pp_on_{which}")["activation"]["1"]) for which in ("first", "last")
    )
    return of("layertype_0"), first, last


def _same_model(layer: Layer, held: _Entries, text: str) -> None:
    theirs, ours = float(held["parameter_size"]), layer.param_count * 4 / MIB
    if not math.isclose(theirs, ours, rel_tol=MODEL_TOLERANCE):
        rule = f"was made for layers of {theirs:.0f} MiB (float32), this model's have {ours:.0f}"
        raise _refused(text, rule, "a profile of this model")


def _times(compute: _Entries, kind: str, seq_len: int, text: str) -> dict[int, float]:
    """Forward seconds by the samples of a microbatch."""
    pattern = re.compile(rf"layertype_{kind}_bsz(\d+)_seq{seq_len}$")
    found = {
        int(match[1]): int(match[1]) * float(value) / 1000
        for key, value in compute.items()
        if (match := pattern.match(key))
    }
    if not found:
        raise _refused(text, f"has no layertype_{kind}_bsz*_seq{seq_len}", "a profile with it")
    return dict(sorted(found.items()))


def _layer_times(forward_s: Mapping[int, float], saved: float, recomputed: float) -> LayerTimes:
    return LayerTimes(
        microbatch=tuple(forward_s),
        forward_s=tuple(forward_s.values()),
        backward_s=tuple(BACKWARD * each for each in forward_s.values()),
        saved_bytes_per_sample=math.ceil(saved * MIB),
        recompute_bytes_per_sample=math.ceil(recomputed * MIB),
    )


def _logits_mib(layer: Layer) -> float:
    """What the planner counts of logits by itself: them and their gradient, in two bytes each."""
    return sum(math.prod(spec.shape) for spec in layer.outputs.values()) * 4 / MIB


def _collectives(
    files: Sequence[Path], cluster: Cluster, text: str
) -> Mapping[Collective, tuple[CollectiveTimes, ...]]:
    """Of groups of neighbouring devices as timed by size; of strided ones by their bandwidth."""
    widest = max(host.n_devices for host in cluster.hosts)
    hosts = len(cluster.hosts)
    place = f"{hosts}nodes_{widest}gpus_per_node"
    timed = _one(files, f"sp_time_{place}", text, "allreduce_size_")
    wide = _one(files, f"allreduce_bandwidth_{place}", text, "allreduce_size_")
    sums: dict[tuple[int, int], dict[int, float]] = {}
    for key, value in timed.items():
        if match := re.match(r"allreduce_size_(\d+)_(\d+)MB_time$", key):
            n = int(match[1])
            shape = n, max(1, n // widest)
            sums.setdefault(shape, {})[int(match[2]) * MIB] = float(value) / 1000
    for key, value in wide.items():
        if match := re.match(r"allreduce_size_(\d+)_consec_([01])$", key):
            n, beside = int(match[1]), match[2] == "1"
            shape = n, max(1, n // widest) if beside else min(n, hosts)
            if shape not in sums:
                share = 2 * (n - 1) / n
                sums[shape] = {
                    size * MIB: share * size * MIB / (float(value) * 1e9) for size in _SIZES_MIB
                }
    whole = [_entry(n, n_hosts, times) for (n, n_hosts), times in sorted(sums.items())]
    halves = [
        _entry(n, n_hosts, {size: seconds / 2 for size, seconds in times.items()})
        for (n, n_hosts), times in sorted(sums.items())
    ]
    sent = _one(files, f"p2p_bandwidth_{place}", text, "pp_size_")
    sends = [
        _entry(
            int(key.removeprefix("pp_size_")),
            min(2, hosts),
            {size * MIB: size * MIB / (float(value) * 1e9) for size in _SIZES_MIB},
        )
        for key, value in sent.items()
    ]
    return {"all_reduce": tuple(whole), **dict.fromkeys(_HALF, tuple(halves)), "send": tuple(sends)}


def _entry(n_devices: int, n_hosts: int, times: Mapping[int, float]) -> CollectiveTimes:
    return CollectiveTimes(
        n_devices=n_devices,
        n_hosts=n_hosts,
        size_bytes=tuple(sorted(times)),
        seconds=tuple(times[size] for size in sorted(times)),
    )


def _refused(text: str, rule: str, legal: str) -> ConfigError:
    return ConfigError([Violation(path="--profile", value=text, rule=rule, legal=legal)])
