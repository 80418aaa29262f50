"""Plans that Galvatron's search wrote, read as drafts.

Its degrees are those of the repeated layers; `vtp` is the tensor parts of embedding and head.
Tensor parts split tokens too, as in its profiles. Data parallelism of type 1 shards parameters;
type 0 is `default_dp_type`.

Source of the format: Hetu-Galvatron 2, `galvatron_config_*.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError, Violation
from ..graph.layer import LayerGraph
from ..plan.ir import Level
from ..plan.order import ORDERS
from .draft import Draft, Strategy

PREFIX = "galvatron:"
_LEVELS: Mapping[str, Level] = {"ddp": "none", "zero2": "grads", "zero3": "params"}
_ORDERS = {"pipedream_flush": "1f1b", "gpipe": "gpipe"}


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that say how a step runs; lists are written as text with commas."""

    pp_deg: int
    tp_sizes_enc: str
    dp_types_enc: str
    checkpoint: str
    world_size: int
    global_bsz: int
    chunks: int
    pp_division: str
    default_dp_type: str
    pipeline_type: str = "pipedream_flush"
    vtp: int = 1
    embed_sdp: int = 0


def read_galvatron_draft(text: str, graph: LayerGraph) -> Draft:
    """The draft in a file, named ``galvatron:FILE``.

    Raises:
        ConfigError: the file is no such plan, or one for another number of layers.
    """
    config = _config(text)
    kinds = Counter(layer.kind for layer in graph.layers)
    (usual, n_repeated), *_ = kinds.most_common(1)
    names = [layer.name for layer in graph.layers]
    repeated = [layer.name for layer in graph.layers if layer.kind == usual]
    tps, types, again = (
        _numbers(getattr(config, field), field, n_repeated, text)
        for field in ("tp_sizes_enc", "dp_types_enc", "checkpoint")
    )
    n = config.world_size // config.pp_deg
    default = _of(_LEVELS, config.default_dp_type, "default_dp_type", text)

    def strategy(tp: int, sharded: int, recompute: int) -> Strategy:
        level: Level = "params" if sharded else default
        shard = n // tp
        whole = shard == 1 or level == "none"
        return Strategy(
            replica=shard if whole else 1,
            shard=1 if whole else shard,
            tp=tp,
            sp=tp > 1,
            level="none" if whole else level,
            recompute=bool(recompute),
        )

    outer = strategy(config.vtp, config.embed_sdp, 0)
    ways = dict(zip(repeated, map(strategy, tps, types, again), strict=True))
    sizes = _numbers(config.pp_division, "pp_division", config.pp_deg, text)
    order = _of(_ORDERS, config.pipeline_type, "pipeline_type", text)
    several = config.pp_deg > 1
    return Draft(
        strategies={name: ways.get(name, outer) for name in names},
        pp=config.pp_deg,
        order=order if several else "",
        stages=_stages(names, repeated, sizes) if several else (),
        holders=ORDERS[order].placements(config.pp_deg) if several else ((0,),),
        microbatches=config.chunks,
        global_batch=config.global_bsz,
        bucket_bytes=0,
        overlap=True,
    )


def _config(text: str) -> _Config:
    path = Path(text.removeprefix(PREFIX))
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        reason = error.strerror or str(error)
        raise _refused(text, f"cannot be read ({reason})", "a file of its search") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _refused(text, f"is no plan of Galvatron: {error}", "its JSON") from error


def _numbers(text: str, field: str, n: int, source: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() for part in parts):
        raise _refused(source, f"has {field} that are no numbers", '"1,1"')
    if len(parts) != n:
        raise _refused(source, f"has {len(parts)} {field} where the model has {n}", f"{n} of them")
    return [int(part) for part in parts]


def _of(known: Mapping[str, Any], value: str, field: str, source: str) -> Any:
    if value not in known:
        raise _refused(source, f"has {field} {json.dumps(value)}", ", ".join(known))
    return known[value]


def _stages(
    names: Sequence[str], repeated: Sequence[str], sizes: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Repeated layers by number; the layers before and after them go with the nearest."""
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes) - 1)]
    cuts = [names.index(repeated[end]) for end in ends]
    edges = [0, *cuts, len(names)]
    return tuple(tuple(names[start:end]) for start, end in pairwise(edges))


def _refused(text: str, rule: str, legal: str) -> ConfigError:
    return ConfigError([Violation(path="--price", value=text, rule=rule, legal=legal)])
