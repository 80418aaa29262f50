"""What a profile holds: times of layer kinds and collectives, measured or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


class FixedBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a layer keeps whatever the microbatch, beside what it keeps of each sample."""

    saved: int = 0
    recompute: int = 0
    again: int = 0


class PartBytes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tensor parts have what a layer saves of a sample (bytes of all parts together).

    What is `inside` regions is divided among them; what lies `between` is whole on each, divided
    where tokens are split; what regions `read` is whole on each, gathered where tokens are split.
    """

    inside: int = 0
    between: int = 0
    read: int = 0


class PassTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of passes against the number of samples; three tuples in parallel, sorted."""

    microbatch: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]


class LayerTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one layer kind against the number of samples in a microbatch.

    The three tuples run in parallel, sorted by microbatch. `saved_bytes_per_sample` is what
    autograd keeps for the backward pass, `recompute_bytes_per_sample` what it keeps when the layer
    is recomputed (its inputs), `again_bytes_per_sample` what it keeps beside these while it is
    computed again (unset: `saved_bytes_per_sample`). `fixed_bytes` come to each of the three.
    `part_bytes` says how tensor parts share the first (unset: whole on each, or divided where
    tokens are split). `parts` are passes of one of so many tensor parts, what they exchange left
    out; those of other numbers are taken to last as passes over as many samples fewer.
    """

    microbatch: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    saved_bytes_per_sample: int
    recompute_bytes_per_sample: int
    again_bytes_per_sample: int | None = None
    fixed_bytes: FixedBytes = FixedBytes()
    part_bytes: PartBytes | None = None
    parts: Mapping[int, PassTimes] = {}

    def saved_of_part(self, tp: int, *, sp: bool) -> float:
        """Bytes of a sample that one of `tp` parts saves; with `sp` tokens are split."""
        whole, parts = self.saved_bytes_per_sample, self.part_bytes
        if parts is None or tp == 1:
            return whole / tp if sp else whole
        if sp:
            return parts.read + (parts.inside + parts.between) / tp
        return whole - parts.inside + parts.inside / tp

    def kept_of_part(self, tp: int, *, sp: bool) -> float:
        """Bytes of a sample that one of `tp` parts keeps of a layer that is recomputed."""
        return self.recompute_bytes_per_sample / (tp if sp else 1)

    def again_of_part(self, tp: int, *, sp: bool) -> float:
        """Bytes of a sample beside these while one of `tp` parts computes it again."""
        again = self.again_bytes_per_sample
        if again is None:
            return self.saved_of_part(tp, sp=sp)
        handed = self.saved_bytes_per_sample - again  # inputs that it saves, less what others do
        return max(0.0, self.saved_of_part(tp, sp=sp) - handed / (tp if sp else 1))


class CollectiveTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one collective over `n_devices` against the bytes of the full tensor; sorted.

    The group spreads over `n_hosts` hosts. A send goes from one of `n_devices` pipeline ranks to
    the next.
    """

    n_devices: int
    n_hosts: int = 1
    size_bytes: tuple[int, ...]
    seconds: tuple[float, ...]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs of a model's layer kinds on a cluster at one precision and sequence length.

    `optimizer_s_per_byte` is seconds of the update per byte of float32 master parameters;
    `matmul_flops` the best measured (or the assumed peak) matrix-product rate of one device;
    `overlap` the share of a gradient reduction that hides behind the backward pass, 0 to 1;
    `sharded_overlap` the same of gathers and reduce-scatters of sharded layers (unset: the same);
    `context_bytes` what a process holds before any tensor. `assumed` is true if any number was
    not measured. `inputs_hash` covers graph, cluster, precision. `global_batch` is the batch that
    it was measured for: no larger microbatch was run (unset: it holds for any).
    """

    layers: Mapping[str, LayerTimes]
    collectives: Mapping[Collective, tuple[CollectiveTimes, ...]]
    optimizer_s_per_byte: float
    matmul_flops: float
    overlap: float
    context_bytes: int
    precision: str
    assumed: bool
    date: str
    hardware: str
    versions: Mapping[str, str]
    inputs_hash: str
    sharded_overlap: float | None = None
    global_batch: int | None = None
