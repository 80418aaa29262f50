"""What a profile was made for, in words: where a hash differs, they say in what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ..cluster.types import Cluster, Link
from ..graph.layer import LayerGraph
from ..units import show_bytes, show_bytes_s, show_seconds

Facts = Mapping[str, Mapping[str, str]]
_MOST = 3  # differences that are said


def facts_of(graph: LayerGraph, cluster: Cluster) -> Facts:
    """Of graph and cluster, the most telling first."""
    return {"graph": _of_graph(graph), "cluster": _of_cluster(cluster)}


def differences(made_for: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """The first facts that differ, with both values; nothing where no fact does.

    >>> differences({"tokens": "[32]", "model": "a"}, {"tokens": "[64]", "model": "a"})
    'tokens: [32] there, [64] wanted'
    """
    if not made_for:
        return ""
    names = dict.fromkeys((*wanted, *made_for))
    pairs = {name: (made_for.get(name, "none"), wanted.get(name, "none")) for name in names}
    said = [f"{name}: {a} there, {b} wanted" for name, (a, b) in pairs.items() if a != b]
    return "; ".join(said[:_MOST])


def _of_graph(graph: LayerGraph) -> dict[str, str]:
    counts = Counter(layer.kind for layer in graph.layers)
    found = {f"{name} of a sample": _shape(spec.shape) for name, spec in graph.inputs.items()}
    found["model"] = graph.name
    found["layers"] = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    for layer in {layer.kind: layer for layer in reversed(graph.layers)}.values():
        found[f"parameters of {layer.kind}"] = f"{layer.param_count:,}"
        for name, spec in layer.outputs.items():
            found[f"{name} of {layer.kind}"] = f"{_shape(spec.shape)} {spec.dtype}"
        found[f"forward flops of {layer.kind}"] = f"{layer.flops:,.0f}"
    return found


def _of_cluster(cluster: Cluster) -> dict[str, str]:
    alike = Counter((host.n_devices, host.device_type) for host in cluster.hosts)
    hosts = [f"{n} of {each} {kind}" for (each, kind), n in alike.items()]
    found = {"devices": str(cluster.n_devices), "hosts": ", ".join(hosts)}
    for name, kind in cluster.device_types.items():
        found[f"memory of {name}"] = show_bytes(kind.memory_bytes, 6)
    found["link inside hosts"] = _link(cluster.intra)
    found["link between hosts"] = _link(cluster.inter)
    return found


def _link(link: Link) -> str:
    return f"{show_bytes_s(link.bandwidth_bytes_s)} after {show_seconds(link.latency_s)}"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
