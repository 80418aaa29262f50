"""An analytic profile from a cluster's figures; everything in it is marked assumed.

A layer takes the longer of its flops at a share of the dense peak and its bytes at a share of the
memory bandwidth (roofline: Williams, Waterman and Patterson 2009). Collectives are rings, but for
exchanges from all to all, in which each device sends to each other by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from ..cluster.detect import CPU
from ..cluster.presets import PRESETS
from ..cluster.types import Cluster, DeviceType
from ..errors import ConfigError, Violation, literal
from ..graph.layer import Layer, LayerGraph
from ..units import show_flops
from .fit import ring_s
from .record import Collective, CollectiveTimes, LayerTimes, Profile
from .saved import SavedBytes, saved_bytes
from .store import made_now
from .trace import compute_dtype

_TRAINED = ("fp64", "fp32", "bf16")  # of what devices offer, the precisions of a run

MATMUL_SHARE = 0.5  # of the dense peak that large products reach in training
MEMORY_SHARE = 0.8  # of the memory bandwidth
LINK_SHARE = 0.7  # of a link's bandwidth; 0.6 to 0.75 measured on two H200 of one host
START_S = 3e-5  # of a collective, beside the links' latency; measured on two H200 of one host
OVERLAP = 0.5
LAUNCH_S = 2e-5  # least seconds of a layer's pass: its kernels are started one by one
CONTEXT_BYTES = 2**30  # contexts of driver and collectives on an accelerator
HOST_CONTEXT_BYTES = 350 * 2**20  # python, torch and transformers, resident
CPU_FLOPS = 3e10  # a processor core; used where the type is CPU and gives no peak
CPU_BANDWIDTH_BYTES_S = 1e10
UNKNOWN_BANDWIDTH_BYTES_S = 5e11  # an accelerator whose memory bandwidth is not known
OPTIMIZER_PASSES = 7  # AdamW reads weight, gradient and two states, and writes all but the gradient
MORE_DEVICES = 2  # ways out of a plan that does not fit try as many times more
LOSS_PASSES = 6  # over float32 logits: copy, log-softmax, its gradient, the copy's gradient
MICROBATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SIZES = tuple(4**power for power in range(5, 16))  # 1 KiB to 1 GiB
OPS: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")


def assume(graph: LayerGraph, cluster: Cluster, precision: str) -> Profile:
    """A profile of this model on a cluster that is not here; the slowest device type counts.

    Raises:
        ConfigError: a device type gives no dense peak for the precision; names each. (A CPU
            without one takes `CPU_FLOPS`.)
    """
    peak_flops = _slowest(cluster, precision)
    bandwidth = min(_bandwidth(kind) for kind in cluster.device_types.values())
    on_host = all(kind.name == CPU for kind in cluster.device_types.values())
    saved = saved_bytes(
        graph,
        precision,
        fused=not on_host,
        parts=graph.tensor_degrees(MORE_DEVICES * cluster.n_devices),
    )
    kinds = {layer.kind: layer for layer in graph.layers}
    last = graph.output.rpartition(".")[0]
    loss_bytes = 0.0
    for layer in graph.layers:
        if layer.name == last:
            elements = sum(math.prod(spec.shape) for spec in layer.outputs.values())
            loss_bytes = elements * 4.0 * LOSS_PASSES
    return Profile(
        layers={
            kind: _layer_times(
                layer,
                saved[kind],
                flops_s=peak_flops * MATMUL_SHARE,
                bytes_s=bandwidth * MEMORY_SHARE,
                width=compute_dtype(precision).itemsize,
                loss_bytes=loss_bytes if kind == graph.layer(last).kind else 0.0,
            )
            for kind, layer in kinds.items()
        },
        collectives=collectives(cluster, operations(graph)),
        optimizer_s_per_byte=OPTIMIZER_PASSES / (bandwidth * MEMORY_SHARE),
        matmul_flops=peak_flops,
        overlap=OVERLAP,
        context_bytes=HOST_CONTEXT_BYTES if on_host else CONTEXT_BYTES,
        assumed=True,
        **made_now(graph, cluster, precision),
    )


def operations(graph: LayerGraph) -> tuple[Collective, ...]:
    """What plans of a model exchange; experts alone go from all to all."""
    routed = any("ep" in layer.splits for layer in graph.layers)
    return (*OPS, "all_to_all") if routed else OPS


def collectives(
    cluster: Cluster, ops: tuple[Collective, ...] = OPS
) -> Mapping[Collective, tuple[CollectiveTimes, ...]]:
    """Times of every group shape that divides the cluster evenly, from the links' figures."""
    shapes = group_shapes(cluster)
    return {
        op: tuple(
            CollectiveTimes(
                n_devices=n_devices,
                n_hosts=n_hosts,
                size_bytes=SIZES,
                seconds=tuple(
                    START_S + _collective_s(op, cluster, n_devices, n_hosts, size) for size in SIZES
                ),
            )
            for n_devices, n_hosts in shapes
        )
        for op in ops
    }


def _collective_s(
    op: Collective, cluster: Cluster, n_devices: int, n_hosts: int, n_bytes: int
) -> float:
    if op != "all_to_all":
        return ring_s(op, n_devices, n_bytes, *_ring_link(cluster, n_devices, n_hosts))
    # Each device sends an equal part to each, over its own share of either kind of link at once.
    n_inside = n_devices // n_hosts
    latency_s, inside_bytes_s = cluster.intra.latency_s, cluster.intra.bandwidth_bytes_s
    moved_s = n_bytes * (n_inside - 1) / n_devices / (inside_bytes_s * LINK_SHARE)
    if n_hosts > 1:
        latency_s = max(latency_s, cluster.inter.latency_s)
        across_bytes_s = cluster.inter.bandwidth_bytes_s * LINK_SHARE
        moved_s = max(moved_s, n_bytes * (n_devices - n_inside) / n_devices / across_bytes_s)
    return latency_s * (n_devices - 1) + moved_s


def group_shapes(cluster: Cluster) -> list[tuple[int, int]]:
    """(devices, hosts) of the groups that a plan can form: so many devices on so many hosts."""
    widest = max(host.n_devices for host in cluster.hosts)
    inside = _divisors(widest)
    across = _divisors(len(cluster.hosts))
    shapes = {(each * hosts, hosts) for each in inside for hosts in across}
    shapes.add((cluster.n_devices, len(cluster.hosts)))
    return sorted(shape for shape in shapes if 1 < shape[0] <= cluster.n_devices)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _ring_link(cluster: Cluster, n_devices: int, n_hosts: int) -> tuple[float, float]:
    """Latency and bandwidth of the slowest part of a ring.

    Between hosts all devices of the group on a host send at once, each over its own share.
    """
    if n_hosts == 1:
        return cluster.intra.latency_s, cluster.intra.bandwidth_bytes_s * LINK_SHARE
    across = cluster.inter.bandwidth_bytes_s * (n_devices / n_hosts)
    inside = cluster.intra.bandwidth_bytes_s if n_devices > n_hosts else across
    steps_across = n_hosts / n_devices
    latency_s = cluster.inter.latency_s * steps_across + cluster.intra.latency_s * (
        1 - steps_across
    )
    return latency_s, min(across, inside) * LINK_SHARE


def _slowest(cluster: Cluster, precision: str) -> float:
    """The lowest peak of the cluster's device types at a precision."""
    peaks = []
    violations = []
    for name, kind in cluster.device_types.items():
        peak = kind.peak_flops.get(precision, CPU_FLOPS if kind.name == CPU else None)
        if peak is None:
            violations.append(_unknown(cluster, name, precision))
        else:
            peaks.append(peak)
    if violations:
        raise ConfigError(violations)
    return min(peaks)


def _unknown(cluster: Cluster, name: str, precision: str) -> Violation:
    """What is known of a type instead of the figure, and how to give it."""
    peaks = cluster.device_types[name].peak_flops
    known = ", ".join(f"{dtype} {show_flops(peak)}/s" for dtype, peak in peaks.items())
    rule = "is not known, so no cost can be assumed"
    trained = [dtype for dtype in _TRAINED if dtype in peaks]
    others = f"train.precision = {' or '.join(map(literal, trained))}" if trained else ""
    if not trained and known:
        rule += f" (known: {known}, which no run trains in)"
    elif known:
        rule += f" (known: {known})"
    figure = f"the dense figure of the vendor's sheet {_where_given(cluster, name, precision)}"
    measured = "a profile measured on such devices (polyreme profile there, --profile FILE here)"
    return Violation(
        path=f"cluster.device_types.{name}.peak_flops.{precision}",
        value=None,
        rule=rule,
        legal="; ".join(filter(None, (others, figure, measured))),
    )


def _where_given(cluster: Cluster, name: str, precision: str) -> str:
    """The lines of a cluster file that give a peak; all of it where a preset has the rest."""
    peak = {precision: "NUMBER Tflops"}
    if {*cluster.device_types} != {name} or all(each.device.name != name for each in PRESETS):
        line = f"peak_flops = {literal(peak)}"
        return f"in a cluster file (--cluster FILE), {line} under [device_types.{name}]"
    types = {name: {"preset": name, "peak_flops": peak}}
    alike = Counter(host.n_devices for host in cluster.hosts)
    hosts = [
        {"device_type": name, "devices": n, **({"count": count} if count > 1 else {})}
        for n, count in alike.items()
    ]
    lines = f"device_types = {literal(types)} and hosts = {literal(hosts)}"
    return f"in a cluster file (--cluster FILE) with the lines {lines}"


def _bandwidth(kind: DeviceType) -> float:
    if kind.memory_bandwidth_bytes_s is not None:
        return kind.memory_bandwidth_bytes_s
    return CPU_BANDWIDTH_BYTES_S if kind.name == CPU else UNKNOWN_BANDWIDTH_BYTES_S


def _layer_times(
    layer: Layer,
    saved: SavedBytes,
    *,
    flops_s: float,
    bytes_s: float,
    width: int,
    loss_bytes: float,
) -> LayerTimes:
    """Times of one kind: each saved byte is written and read once, each parameter read once."""
    param_bytes = layer.param_count * width

    def seconds(microbatch: int, passes: int) -> float:
        moved = passes * float(param_bytes + 2 * saved.saved * microbatch)
        moved += loss_bytes * microbatch / 2
        return max(passes * layer.flops * microbatch / flops_s, moved / bytes_s, LAUNCH_S)

    return LayerTimes(
        microbatch=MICROBATCHES,
        forward_s=tuple(seconds(size, 1) for size in MICROBATCHES),
        backward_s=tuple(seconds(size, 2) for size in MICROBATCHES),
        saved_bytes_per_sample=saved.saved,
        recompute_bytes_per_sample=saved.recompute,
        again_bytes_per_sample=saved.again,
        fixed_bytes=saved.fixed,
        alone_bytes=saved.alone,
        part_bytes=saved.parts,
    )
